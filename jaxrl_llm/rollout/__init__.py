"""How responses are generated: `distribution`, `sampler`, `groups`. The menu holds strategies of methods."""

__all__: list[str] = []
