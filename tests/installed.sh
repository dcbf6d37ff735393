# Tries what is installed in the environment DIST, in a folder of its own: `make test-dist`.
set -eu
export PATH="$DIST:$PATH" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
unset PYTHONPATH || true
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
lmeval-prune --version
lmeval-prune models --get smollm2-135m
lmeval-prune --help > help.txt
python -c 'import lmeval_prune as p; print([getattr(p, name) for name in p.__all__ if name != "__version__"][0], p.__file__)'
lmeval-prune mask --pretrained smollm2-135m --heads L5H3 --output mask.json
# no pipe: what fails in front of one does not end the script, and the message of a failure names the task, too
lm_eval --model pruned-hf --model_args pretrained=smollm2-135m,mask=mask.json --tasks prune_tiny_choice --limit 2 > table.txt
grep "|prune_tiny_choice|" table.txt
python -c 'from pathlib import Path; import lmeval_prune; assert (Path(lmeval_prune.__file__).parent / "configs/grid/quick.yaml").is_file()'
