"""How responses are generated: `distribution`, `sampler` and `groups`. The menu holds strategies of methods."""

__all__: list[str] = []
