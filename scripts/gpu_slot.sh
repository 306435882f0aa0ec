#!/usr/bin/env bash
# Minutes of a GPU, on a machine that may have no network: what waits for one, as far as the time suffices.
#
#   scripts/gpu_slot.sh pack             # where there is a network: wheels and images, in gpu_pack/
#   scripts/gpu_slot.sh train [--dry-run] [--toy]    # the next runs of the benchmark cifar10_slots
#   scripts/gpu_slot.sh speed [--toy] [PART...]    # tests marked gpu, steps and operations beside their
#                                                    peers, loading; or some of these parts
#
# Both set up from gpu_pack/ what the machine lacks, where that folder is; else they take the active
# environment and the images in $SOLO_EXT_DATA/cifar10/{train,test}. `--dry-run` says what would run and
# when, `--toy` runs everything at tiny sizes on a CPU. Repeat the command, or call it on another machine
# with the records that came back: a run that has a record is not run again.
#
#   MINUTES=9     after which it has ended, set-up included
#   PARALLEL=6    runs at once
#   OUT           a folder for gpu_slot.tar.gz: records, logs and environments, at most a few MiB
#   PACK, WORK    other folders than gpu_pack and benchmark_runs/gpu_slot
#   PYTHON=python3, PACK_PYTHON=3.12 (of the machine with the GPU), SOLO_LEARN_ROOT (main; else 1.0.2)
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=${PYTHON:-python3}
pack=${PACK:-$PWD/gpu_pack} work=${WORK:-$PWD/benchmark_runs/gpu_slot}
# What a machine with PyTorch for GPUs need not have, with what these need; all are small.
wheels=(hydra-core omegaconf antlr4-python3-runtime pydantic pydantic-core annotated-types
    typing-inspection lightning pytorch-lightning lightning-utilities torchmetrics timm safetensors
    einops tqdm rich filelock packaging jinja2 typing-extensions pyyaml)

fail() { echo "gpu_slot.sh: $*" >&2; exit 2; }

pack() {
    [ $# = 0 ] || fail "pack: no option $1"
    local data=${SOLO_EXT_DATA:-datasets}/cifar10 split
    [ -d "$data/train" ] && [ -d "$data/test" ] || fail "$data: no train/ and test/; set SOLO_EXT_DATA"
    command -v pip >/dev/null || fail "pack: it takes pip, of any Python, to gather the wheels"
    rm -rf "$pack" && mkdir -p "$pack/wheels"
    echo "== wheels for Python ${PACK_PYTHON:-3.12}"
    local pinned=() name
    for name in "${wheels[@]}"; do
        pinned+=("$(grep -m1 "\"$name==" pyproject.toml | sed 's/^ *"//; s/[" ;].*//')")
    done
    local platforms=() number
    for number in 2_17 2_24 2_27 2_28 2_31 2_34 2_35; do platforms+=(--platform "manylinux_${number}_x86_64"); done
    # It has no wheel of its own there.
    pip wheel -q --no-deps -w "$pack/wheels" "$(printf '%s\n' "${pinned[@]}" | grep antlr4)"
    pip download -q --no-deps --only-binary=:all: --python-version "${PACK_PYTHON:-3.12}" \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --find-links "$pack/wheels" \
        -d "$pack/wheels" "${pinned[@]}"
    if [ -n "${SOLO_LEARN_ROOT:-}" ]; then
        mkdir "$pack/host" && cp -r "$SOLO_LEARN_ROOT/solo" "$pack/host/"
    else
        pip download -q --no-deps -d "$pack/wheels" solo-learn==1.0.2
    fi
    # The copy that is taken along has no git.
    git rev-parse HEAD >"$pack/commit"
    [ -z "$(git status --porcelain -- solo_ext configs)" ] || echo changed >>"$pack/commit"
    echo "== images"
    for split in train test; do tar -czf "$pack/$split.tar.gz" -C "$data" "$split"; done
    du -sm "$pack" | sed "s|\t.*| MiB in $pack|"
}

set_up() {
    [ -d "$pack" ] || return 0
    echo "== set-up"
    local lacking
    lacking=$($python - "$pack/wheels" <<'P'
import importlib.metadata as held, pathlib, re, sys
names = {re.sub(r"[_.]+", "-", w.name.split("-")[0]).lower() for w in pathlib.Path(sys.argv[1]).glob("*.whl")}
def there(name):
    try:
        return bool(held.version(name))
    except held.PackageNotFoundError:
        return False
print(*sorted(n for n in names if not there(n)))
P
    )
    # shellcheck disable=SC2086 # several names
    [ -z "$lacking" ] || $python -m pip install -q --no-index --no-deps --no-compile --upgrade \
        --find-links "$pack/wheels" --target "$work/site" $lacking
    if [ ! -e "$work/data/whole" ]; then
        mkdir -p "$work/data/cifar10"
        local split
        for split in train test; do tar -xzf "$pack/$split.tar.gz" -C "$work/data/cifar10"; done
        touch "$work/data/whole"
    fi
    SOLO_EXT_COMMIT=$(tr '\n' ' ' <"$pack/commit" | sed 's/ $//')
    export SOLO_EXT_COMMIT SOLO_EXT_DATA=$work/data
    export PYTHONPATH=$root:$work/site:$pack/host${PYTHONPATH:+:$PYTHONPATH}
}

train() {
    local dry=() toy='' word out=results/cifar10_slots stages=(a b c claims teacher d) more=()
    for word; do
        case $word in
            --dry-run) dry=(--dry-run) ;;
            --toy) toy=yes ;;
            *) fail "train: no option $word" ;;
        esac
    done
    mkdir -p "$work"
    set_up
    if [ -n "$toy" ]; then
        export CUDA_VISIBLE_DEVICES=
        out=$work/toy stages=(a)
        local tiny="'max_epochs=2','scheduler.warmup_epochs=1','precision=32-true','accelerator=cpu'"
        tiny+=",'backbone.name=timm/resnet10t','optimizer.batch_size=32'"
        more=("budgets.50=[$tiny,'backbone.kwargs={channels: [8, 8, 8, 8], stem_width: 8, small_stem: false}']"
            "evaluation.linear={max_iterations: 5}" --rows simclr hard_negative)
    else
        [ -n "${dry[*]}" ] || needs_gpu
    fi
    # Whole minutes, so that up to one is kept for what comes back.
    local minutes=$((${MINUTES:-9} - (SECONDS + 59) / 60)) code=0
    [ "$minutes" -ge 1 ] || fail "no time is left of MINUTES=${MINUTES:-9}"
    $python -m solo_ext benchmark run cifar10_slots "${more[@]:0:2}" --out "$out" --stages "${stages[@]}" \
        --parallel "${PARALLEL:-6}" --within "$minutes" "${dry[@]}" "${more[@]:2}" || code=$?
    [ -n "${dry[*]}" ] || give_back "$out"
    exit "$code"
}

# What comes back: no weights, no images.
give_back() {
    [ -n "${OUT:-}" ] && [ -d "$1" ] || return 0
    mkdir -p "$OUT"
    (cd "$1" && find . -name '*.jsonl' -o -name '*.log' -o -name '*.yaml' -o -name '*.md' -o -name '*.txt' \
        -o -name '*.xml' -o -name environment.json -o -name verdicts.json |
        tar -czf "$OUT/gpu_slot.tar.gz" -T -)
    du -sk "$OUT/gpu_slot.tar.gz" | sed "s|\t.*| KiB in $OUT/gpu_slot.tar.gz|"
}

needs_gpu() {
    $python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
        fail "torch sees no GPU; --toy runs on a CPU"
}

# part NAME MOST COMMAND...: runs it for so many seconds of those that are left, and goes on if it fails.
part() {
    local name=$1 most=$2 left=$((60 * ${MINUTES:-9} - SECONDS - 15)) begin=$SECONDS code=0
    shift 2
    if [ "$left" -lt 20 ]; then
        echo "$name: not started, the time is over" | tee -a "$work/speed/parts.txt"
        return 0
    fi
    echo "== $name: $*"
    [ "$left" -le "$most" ] || left=$most
    # Interrupted, pytest says what it has seen.
    timeout -s INT -k 10 "$left" "$@" 2>&1 | tee "$work/speed/$name.log" || code=$?
    case $code in
        0) echo "$name: done in $((SECONDS - begin)) s" ;;
        124 | 137) echo "$name: unfinished, its time is over" ;;
        *) echo "$name: FAILED, exit code $code; $name.log ends with: $(tail -n 1 "$work/speed/$name.log")" ;;
    esac | tee -a "$work/speed/parts.txt"
}

speed() {
    # Short rows first: a part may use up the time of those after it.
    local all=(graph-tests tests steps queue-loss nearest protocpc mochi sinkhorn augmentation graphs counts loading)
    local toy='' word parts=() device=(--device cuda) folders
    local tests=(-m gpu -q --continue-on-collection-errors)
    for word; do
        case $word in
            --toy) toy=yes ;;
            *) [[ " ${all[*]} " == *" $word "* ]] || fail "speed: no option $word"
                parts+=("$word") ;;
        esac
    done
    mkdir -p "$work/speed"
    : >"$work/speed/parts.txt"
    set_up
    if [ -n "$toy" ]; then
        export CUDA_VISIBLE_DEVICES=
        all=(tests sinkhorn nearest)
        device=(--device cpu --quick)
        folders=(-n 0 tests/clustering/test_backends.py)
    else
        needs_gpu
        # A machine may lack what the tests of other folders import.
        mapfile -t folders < <(grep -rl --include='*.py' 'mark\.gpu' tests | xargs -n 1 dirname | sort -u)
        folders=(-n 4 "${folders[@]}" -k 'not test_graphs')
    fi
    for word in "${parts[@]:-${all[@]}}"; do
        case $word in
            graph-tests) part "$word" 180 env TORCHINDUCTOR_COMPILE_THREADS=2 "$python" -m pytest \
                "${tests[@]}" "--junitxml=$work/speed/$word.xml" -n 13 tests/lab/training/test_on_a_gpu.py -k test_graphs ;;
            tests) part "$word" 120 "$python" -m pytest "${tests[@]}" "--junitxml=$work/speed/$word.xml" \
                "${folders[@]}" ;;
            *) part "$word" 240 "$python" -m benchmarks "$word" "${device[@]}" --check \
                --json "$work/speed/speed.jsonl" ;;
        esac
    done
    give_back "$work/speed"
    [ ! -f "$work/speed/speed.md" ] || cat "$work/speed/speed.md"
    cat "$work/speed/parts.txt"
    ! grep -q FAILED "$work/speed/parts.txt"
}

case ${1:-} in
    pack | train | speed) "$@" ;;
    *) sed -n '2,20s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
