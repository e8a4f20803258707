"""Reading, validating and tokenising data sets."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from learner.data import check_files, load_prompts
from learner.data.dataset import check_overlap
from learner.data.readers import read_rows
from learner.data.tokenization import PromptTokenizer
from protocol.errors import UserError
from tests.learner.coordinator.harness import rows, tokenizer_folder


@pytest.fixture
def tokenizer(tmp_path):
    return PromptTokenizer(tokenizer_folder(tmp_path / "model"))


def load(tokenizer, data, limit=512):
    return load_prompts([data], tokenizer=tokenizer, max_prompt_tokens=limit)


def changed(row, **reward_model):
    return row | {"reward_model": reward_model}


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "pkl", "list", "file://"])
def test_all_kinds_of_files_give_the_same_prompts(tmp_path, tokenizer, kind):
    data = rows(5)
    path = tmp_path / f"data.{'parquet' if kind == 'file://' else kind}"
    source = str(path)
    if kind in ("parquet", "file://"):
        parquet.write_table(pa.Table.from_pylist(data), path)
        source = f"file://{path}" if kind == "file://" else source
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in data))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in data).encode()))
    elif kind == "pkl":
        path.write_bytes(pickle.dumps([row | {"prompt": np.asarray(row["prompt"]).tolist()} for row in data]))
    else:
        source = data
    found = load_prompts([source], tokenizer=tokenizer, max_prompt_tokens=512)
    expected = load(tokenizer, data)
    assert [p.prompt_id for p in found.prompts] == [p.prompt_id for p in expected.prompts]
    assert found.content_hash == expected.content_hash
    payload = json.loads(found.prompts[2].payload)
    assert payload.pop("prompt")[-1]["role"] == "user"
    assert payload == {"style": "rule", "ground_truth": "3", "extra_info": {"index": 2}}


def test_token_ids_are_those_of_the_chat_template(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "model"))
    row = rows(1)[0]
    ids = reference.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert load(tokenizer, [row]).prompts[0].token_ids.tolist() == list(ids)


def test_b80_over_limit_and_empty_prompts_are_listed_and_nothing_is_cut(tokenizer):
    base = rows(1)[0]
    length = len(load(tokenizer, [base]).prompts[0].token_ids)

    def sized(extra):
        return base | {"prompt": [{"role": "user", "content": base["prompt"][0]["content"] + "x" * extra}]}

    empty = [base | {"prompt": p} for p in ([], "", [{"role": "user", "content": "  "}], None)]
    found = load(tokenizer, [sized(0), sized(1), sized(1000), *empty], limit=length)
    assert [len(p.token_ids) for p in found.prompts] == [length]
    assert [(x.row, x.kind) for x in found.left_out] == [
        (4, "empty"),
        (5, "empty"),
        (6, "empty"),
        (7, "empty"),
        (2, "over_limit"),
        (3, "over_limit"),
    ]
    assert f"{length + 1} tokens" in str(found.left_out[4])


def test_b81_rows_without_a_usable_reference_are_named_and_left_out(tokenizer):
    base = rows(8)
    bad = [
        base[0] | {"reward_model": None},
        changed(base[1], style="rule"),
        changed(base[2], style="rule", ground_truth=None),
        changed(base[3], style="rule", ground_truth="  "),
        changed(base[4], style="rule", ground_truth="[]"),
        changed(base[5], style="rule", ground_truth="}{(("),
        changed(base[6], style="rule", ground_truth="just text") | {"ability": "code"},
        base[7],
    ]
    found = load(tokenizer, bad)
    assert len(found) == 1
    assert [(x.row, x.kind) for x in found.left_out] == [(row, "bad_gold") for row in range(1, 8)]


def test_skywork_ground_truths_are_understood(tokenizer):
    base = rows(3)
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    data = [
        changed(base[0], style="rule", ground_truth='["34"]'),
        changed(base[1], style="rule", ground_truth="025"),
        changed(base[2], style="rule", ground_truth=tests) | {"ability": "code"},
    ]
    found = load(tokenizer, data)
    assert [json.loads(p.payload)["ground_truth"] for p in found.prompts] == ['["34"]', "025", tests]


def test_b82_overlap_up_to_case_and_spaces_is_counted_and_refused(tokenizer):
    train = load(tokenizer, rows(10))
    shouted = [
        row | {"prompt": [{"role": "user", "content": f"  TOY  {i} + 1 =   ?"}]} for i, row in enumerate(rows(2))
    ]
    held_out = load(tokenizer, shouted + rows(8, source="other"))
    assert len(check_overlap(train, held_out, max_fraction=0.5)) == 2
    with pytest.raises(UserError, match=r"2 of 10 evaluation prompts.*max_eval_overlap"):
        check_overlap(train, held_out, max_fraction=0.1)


def test_content_hash_notices_order_and_answers(tokenizer):
    data = rows(4)
    hashes = {
        load(tokenizer, data).content_hash,
        load(tokenizer, data[::-1]).content_hash,
        load(tokenizer, [*data[:3], changed(data[3], style="rule", ground_truth="77")]).content_hash,
        load(tokenizer, data[:3]).content_hash,
    }
    assert len(hashes) == 4


def test_repeated_rows_have_ids_of_their_own(tokenizer):
    found = load(tokenizer, rows(1) * 3)
    assert len({p.prompt_id for p in found.prompts}) == 3


class Evil:
    def __reduce__(self):
        return (print, ("this runs",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.parquet", None, "does not exist"),
        ("a.parquet", b"not parquet", "not a readable Parquet file"),
        ("a.jsonl", b'{"prompt": ', "not a JSON-lines file"),
        ("a.jsonl", b"[1, 2]", "line 1: a row must be a JSON object"),
        ("a.jsonl", b'{"prompt": "x"}', "column reward_model is missing"),
        ("a.csv", b"x", "unknown kind"),
        ("a.pkl", pickle.dumps(Evil()), "print, which is not plain data"),
        ("a.pkl", pickle.dumps({"a": 1}), "expected a list"),
        ("a.jsonl", b"", "no usable prompt"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, tokenizer, capsys, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_prompts([str(path)], tokenizer=tokenizer, max_prompt_tokens=100)
    assert "\n" not in str(error.value)
    assert "this runs" not in capsys.readouterr().out


def test_report_of_files(tmp_path, tokenizer):
    golds = ["1", 2, '["3"]', ["4"], json.dumps({"inputs": ["1"], "outputs": ["2"]})]
    data = [changed(row, style="rule", ground_truth=gold) for row, gold in zip(rows(5), golds, strict=True)]
    data[4]["ability"] = "code"
    shouted = rows(1)[0] | {"prompt": [{"role": "user", "content": "TOY 0  + 1 = ?"}]}
    first, second, held_out = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "eval.jsonl"))
    first.write_text("\n".join(json.dumps(row) for row in [*data, rows(1)[0] | {"prompt": ""}]))
    second.write_text(json.dumps(shouted))
    held_out.write_text("\n".join(json.dumps(row) for row in rows(2, start=3)))
    report = check_files(
        [str(first), str(second)], tokenizer_folder=str(tmp_path / "model"), eval_files=[str(held_out)]
    )
    assert (report.num_rows, report.num_usable, report.by_source) == (7, 6, {"toy": 6})
    assert report.gold_kinds == {
        "text": 2,
        "number": 1,
        "list as JSON text": 1,
        "list": 1,
        "object as JSON text": 1,
    }
    assert len(report.duplicates) == 1 and len(report.overlap or []) == 2
    assert report.schema["data_source"] == "string" and report.schema["reward_model"].startswith("mixed types")
    text = "\n".join(report.lines())
    for part in ("row 6: the prompt is empty", "left out: 1 (empty 1)", "duplicates: 1", "evaluation files: 2"):
        assert part in text


def test_data_check_reads_addresses_and_says_what_it_found(tmp_path, tokenizer, capsys):
    from deploy.cli import run

    path = tmp_path / "data.parquet"
    parquet.write_table(pa.Table.from_pylist(rows(3)), path)
    folder = str(tmp_path / "model")
    assert run(["data", "check", f"file://{path}", "--tokenizer", folder]) == 0
    assert "3 of 3 rows usable" in capsys.readouterr().out
    assert run(["data", "check", str(path), "--tokenizer", folder, "--against", str(path)]) == 64
    assert "also in the evaluation files: 3" in capsys.readouterr().out


def test_struct_columns_unified_by_parquet_lose_their_empty_keys(tmp_path, tokenizer):
    data = [rows(1)[0] | {"extra_info": {"a": 1}}, rows(1, start=1)[0] | {"extra_info": {"b": 2}}]
    path = Path(tmp_path / "data.parquet")
    parquet.write_table(pa.Table.from_pylist(data), path)
    found = load_prompts([str(path)], tokenizer=tokenizer, max_prompt_tokens=100)
    assert [json.loads(p.payload)["extra_info"] for p in found.prompts] == [{"a": 1}, {"b": 2}]
    assert next(read_rows(str(path)))["data_source"] == "toy"
