#!/usr/bin/env bash
# Installs the wheel into empty environments and uses it from another folder.
# `check_wheel.sh WHEEL PYTHON` takes these; without words, a wheel that is made from the sdist.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ $# -gt 0 ]; then
    wheel=$(realpath "$1")
    python=$2
else
    uv build --quiet --out-dir "$scratch/dist"
    wheel=$(echo "$scratch"/dist/*.whl)
    python=$(uv run python -c 'import sys; print(sys._base_executable)')
fi
uv venv --quiet --python "$python" "$scratch/venv"
uv pip install --quiet --python "$scratch/venv/bin/python" \
    --constraint "$root/requirements.lock" "$wheel"
cd "$scratch"
venv/bin/python - "$wheel" <<'PY'
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
assert f"-{solo_ext.__version__}-" in sys.argv[1], (solo_ext.__version__, sys.argv[1])
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

# The losses ask for torch alone.
uv venv --quiet --python "$python" torch
uv pip install --quiet --python torch/bin/python --constraint "$root/requirements.lock" torch numpy
uv pip install --quiet --python torch/bin/python --no-deps "$wheel"
torch/bin/python - <<'PY'
import torch

from solo_ext.losses import hard_negative_loss_func, nt_xent_loss_func

z = torch.randn(2, 8, 4, requires_grad=True)
(nt_xent_loss_func(*z) + hard_negative_loss_func(*z)).backward()
assert z.grad is not None and z.grad.isfinite().all()
print("wheel: losses work with torch alone")
PY
