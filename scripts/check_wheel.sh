#!/usr/bin/env bash
# Builds the wheel, installs it into an empty environment and uses it from another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

uv build --quiet --wheel --out-dir "$scratch/dist"
python=$(uv run python -c 'import sys; print(sys._base_executable)')
uv venv --quiet --python "$python" "$scratch/venv"
uv pip install --quiet --python "$scratch/venv/bin/python" \
    --constraint "$root/requirements.lock" "$scratch"/dist/*.whl
cd "$scratch"
venv/bin/python - <<'PY'
import sys
from pathlib import Path

import solo_ext
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core.files import config_root

package = Path(solo_ext.__file__).parent
assert Path(sys.prefix).resolve() in package.resolve().parents, f"{package} is not the wheel's"
assert config_root() == package / "configs", config_root()
assert (package / "py.typed").is_file()
assert (package / "lab" / "page.html.jinja").is_file()
names = shipped_configs()
assert "digits/debiased" in names, names
assert compose("digits/debiased")["method"] == "debiased"
import hydra_plugins.solo_ext_search_path

print(f"wheel: {len(names)} configs found in the installed package")
PY
# No solo-learn is in this environment: doctor must say how to get one, and a command must end
# with one line and exit code 2.
venv/bin/solo-ext doctor >findings
grep -q "solo-learn==1.0.2" findings
code=0
venv/bin/solo-ext methods 2>message || code=$?
if [ "$code" != 2 ] || [ "$(wc -l <message)" != 1 ]; then
    echo "exit code $code without solo-learn, and this message:" >&2
    cat message >&2
    exit 1
fi
echo "wheel: without solo-learn: $(cut -c1-60 message)..."
