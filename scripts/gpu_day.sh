#!/usr/bin/env bash
# Everything that waits for a GPU, on one GPU: what docs/benchmarks/run.md, "A day with a GPU", lists.
#
#   scripts/gpu_day.sh [OUT]            # records, logs and page.html in OUT; benchmark_runs/gpu_day
#   EPOCHS=100 scripts/gpu_day.sh       # of each training run; 200
#   scripts/gpu_day.sh --toy [OUT]      # on a CPU in a minute, in OUT/toy: whether everything runs
#
# Paths count from the checkout; the environment with solo_ext is the active one. A part that is
# done is not done again: repeat the command after an interruption, or for the parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

toy=
[ "${1:-}" != --toy ] || { toy=yes && shift; }
case "${1:-}" in -*) echo "gpu_day.sh [--toy] [OUT]: no option ${1}" >&2 && exit 2 ;; esac
out=${1:-benchmark_runs/gpu_day}${toy:+/toy}
mkdir -p "$out/logs" "$out/done" || exit 2
# Left to itself, bash would go on with the next part.
trap 'echo "stopped; the same command goes on" >&2; exit 130' INT TERM

failed=0
: >"$out/parts.txt"
say() { echo "$*" | tee -a "$out/parts.txt"; }

# part NAME COMMAND...: does it, unless that is done, and goes on if it fails.
part() {
    local name=$1 log="$out/logs/$1.log" mark="$out/done/$1" begin=$SECONDS code=0
    shift
    [ ! -e "$mark" ] || { say "$name: done before, in $(cat "$mark") s" && return; }
    echo "== $name: $*"
    # tee must outlive Ctrl-C, which the command may answer by saving.
    "$@" 2>&1 | tee -i "$log" || code=$?
    if [ "$code" = 0 ]; then
        echo "$((SECONDS - begin))" >"$mark"
        say "$name: done in $(cat "$mark") s"
    else
        failed=1
        say "$name: FAILED, exit code $code; $log ends with: $(tail -n 1 "$log")"
    fi
}

tests=(-m gpu -n 0 -q --junitxml="$out/tests.xml")
e_step=(--rows 1281167 --clusters 25000 50000 100000 --device cuda)
epochs=${EPOCHS:-200} training=()
if [ -n "$toy" ]; then
    export CUDA_VISIBLE_DEVICES=
    rows=concentrations
    tests+=(tests/clustering/test_backends.py)
    images=(--images 256 --sizes 32 --rounds 1 --sources "torchvision, 0 workers" "dali cpu, 1 thread")
    e_step=(--rows 2000 --clusters 25 50 100)
    speed=(--device cpu --quick)
    digits="'precision=32-true','backbone.kwargs.channels=[8,16,16,16]','limit_val_batches=0'"
    epochs=1
    training=("~datasets.cifar10" "datasets.digits.changes=[$digits]" --rows pcl)
else
    asked='import torch; from benchmarks.speed.rows import ROWS
if not torch.cuda.is_available(): raise SystemExit("torch sees no GPU; --toy runs on a CPU")
print(*ROWS)'
    rows=$(python -c "$asked") || exit 2
    images=(--sizes 128 --rounds 3 --sources "torchvision, 2 workers" "dali cpu, 2 threads"
        "batch, in memory" "dali gpu, 2 threads")
    speed=(--device cuda)
fi

part tests python -m pytest "${tests[@]}"
part images python -m benchmarks.loading "${images[@]}" --json "$out/images.jsonl"
part e-step python -m benchmarks.e_step_ranks --ranks 1 --rounds 2 "${e_step[@]}" \
    --json "$out/e_step.jsonl"
for row in $rows; do
    part "speed-$row" python -m benchmarks.speed "${speed[@]}" --check --rows "$row" \
        --json "$out/speed.jsonl"
done
part "training-$epochs" python -m solo_ext benchmark run gpu_day \
    "budgets.default=['max_epochs=$epochs']" "${training[@]}" --out "$out/training"

python -m benchmarks.gpu_day "$out" || failed=1
cat "$out/parts.txt"
exit "$failed"
