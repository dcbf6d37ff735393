"""How the files beside this were written, each by the code of the commit that wrote such files.

    git archive COMMIT | tar -x -C OLD && PYTHONPATH=OLD python tests/formats/write.py WHAT tests/formats

| WHAT | commit | version of the format |
| --- | --- | --- |
| `mask` | b8a7dde | head mask 1: `mask_1.json` |
| `mask` | 0923b5d | head mask 2: `mask_2.json` |
| `outcomes` | 3776e79 | outcome store 1, with the answers of a run that was interrupted: `outcomes_1` |
"""

import sys
from pathlib import Path


def mask(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from lmeval_prune.interventions import HeadMask

    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, _name_or_path="tiny", **sizes)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    try:
        from lmeval_prune.architectures import find_attention

        described = find_attention(model)
    except ImportError:
        from lmeval_prune.architectures import map_model

        described = map_model(model)
    from lmeval_prune.interventions import base, head_mask

    version = getattr(base, "SCHEMA_VERSION", None) or head_mask.SCHEMA_VERSION
    heads = HeadMask.parse("L0H1-2+L1H3") if hasattr(HeadMask, "parse") else HeadMask("L0H1-2+L1H3")
    heads.save(folder / f"mask_{version}.json", described)


def outcomes(folder: Path) -> None:
    from lmeval_prune.sprint.outcomes import OutcomeStore, Question

    store = OutcomeStore(folder / "outcomes_1")
    settings = {"generation": {"max_gen_toks": 8, "do_sample": False}, "question_field": "question", "num_fewshot": 0}
    rows = [
        {
            "task": "t",
            "split": "test",
            "doc_id": i,
            "question": f"{i} + 1?",
            "prompt": f"p{i}",
            "attributes": {"grade": i},
        }
        for i in (0, 1, 2)
    ]
    store.begin({"name": "tiny", "weights": "abc"}, {"t": settings}, rows, ["dense", "L0H1", "L10H0"])
    store.open(0)
    for row in rows[:2]:
        for head in ("dense", "L0H1", "L10H0"):
            answer = f"{row['doc_id'] + (head != 'L0H1')}"
            store.add(Question("t", "test", row["doc_id"]), head, answer, [row["doc_id"], 7])
    store.end_journal()
    store.merge()
    store.score(lambda cells: [(cell["text"] == str(question.doc_id + 1), cell["text"]) for question, cell in cells])
    store.open(0)
    store.add(Question("t", "test", 2), "dense", "3", [2, 2, 7])  # the run is killed before this is scored
    store.close()


if __name__ == "__main__":
    {"mask": mask, "outcomes": outcomes}[sys.argv[1]](Path(sys.argv[2]))
