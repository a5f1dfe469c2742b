#!/usr/bin/env bash
# Makes .venv with everything the project needs, in the versions of the tests (constraints.txt), and says which PyTorch it took:
# pip's own choice for this machine, or the one that is in .venv already. Run by demo.sh and test.sh; safe to repeat.
#   setup.sh          what a run needs
#   setup.sh dev      and what the tests need
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra="${1:-}"
python="${PYTHON:-python3}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "error: Python 3.11 or newer is needed; set PYTHON to one (found: $("$python" --version 2>&1 || echo none))" >&2
  exit 2
fi
if [ ! -x .venv/bin/python ]; then
  "$python" -m venv .venv || { echo "error: python3 -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 2; }
fi
# Installed again only when the requirements or the interpreter changed.
stamp=".venv/.installed-${extra:-run}"
want="$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1) $(.venv/bin/python --version)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  echo "installing into .venv (once; this can take some minutes)"
  # A PyTorch that is there stays, and so does the Triton that came with it.
  there="$(.venv/bin/python -c 'from importlib.util import find_spec
print("".join(f"|^{name}==" for name in ("torch", "triton") if find_spec(name)))')"
  grep -vE "^#$there" constraints.txt > .venv/.constraints.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c .venv/.constraints.txt -e ".${extra:+[$extra]}"
  .venv/bin/python -m workbench.commands.environment
  echo "$want" > "$stamp"
fi
