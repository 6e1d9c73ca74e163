"""Captions: what is embedded by what, what is read back of it, and mistakes in them."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from noiseclock.lab import captions, data as lab_data
from noiseclock.lab.captions import EmbeddedSet, embed
from noiseclock.lab.data import Files, batches, head, load
from noiseclock.lab.encoder import Encoder
from noiseclock.lab.errors import Mistake
from shapes import CAPTIONS, KINDS, WORDINGS, judged, write_embedded, write_encoder, write_shapes, write_tokenizer
from small_runs import content


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_embedded(tmp_path_factory.mktemp("captions"))


# --- embedding ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "make"), [("clip", CLIPTextModel), ("t5", T5EncoderModel), ("both", CLIPTextModel)])
@torch.no_grad()
def test_embeddings_are_those_of_transformers(tmp_path, kind, make):
    folder = write_encoder(tmp_path / "encoder", kind)
    tokenizer, theirs = AutoTokenizer.from_pretrained(folder), make.from_pretrained(folder).eval()
    pictures = write_shapes(tmp_path / "pictures", 12)
    assert embed(pictures, folder, tmp_path / "embedded", batch=5) == 36
    found = load_file(tmp_path / "embedded" / "00000.safetensors")
    given = tokenizer(CAPTIONS, padding="max_length", max_length=8, truncation=True, return_tensors="pt")
    wanted = theirs(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state
    assert found["tokens"].dtype == torch.float16
    assert torch.equal(found["mask"], given["attention_mask"].bool())
    # float16 keeps 11 bits of numbers up to 4, and sums in batches of another size differ in the last of 24
    assert (found["tokens"].float() - wanted).abs().max() < 2e-3
    alone = theirs(
        **{name: tokenizer([""], padding="max_length", max_length=8, return_tensors="pt")[name] for name in ("input_ids", "attention_mask")}
    )
    empty = EmbeddedSet(tmp_path / "embedded").empty
    assert (empty[:2].float() - alone.last_hidden_state[0, :2]).abs().max() < 2e-3
    assert not empty[2:].any()


def test_the_index_says_what_was_embedded_by_what(place):
    index = json.loads((place / "embedded" / "index.json").read_text())
    assert index["encoder"] == "encoder (CLIPTextModel)"
    assert (index["length"], index["width"], index["captions"], index["pictures"]) == (8, 16, 180, "../pictures")
    lines = [json.loads(line) for line in (place / "embedded" / "captions.jsonl").read_text().splitlines()]
    assert lines[:2] == [{"file": "0.png", "caption": "a red circle"}, {"file": "0.png", "caption": "one red circle on black"}]


@pytest.mark.parametrize("kind", ["clip", "t5"])
def test_what_fills_a_caption_up_changes_none_of_its_tokens(tmp_path, kind):
    folder = write_encoder(tmp_path / "encoder", kind)
    long, short = (Encoder(folder, length=length)(["a red circle"]).seen() for length in (8, 6))
    assert (long[:, :5].float() - short[:, :5].float()).abs().max() < 2e-3
    assert long[:, :5].any(2).all()
    assert not long[:, 5:].any()
    assert not short[:, 5:].any()


def test_several_files_read_like_one(place, tmp_path, monkeypatch):
    monkeypatch.setattr(captions, "SHARD", 50)
    embed(place / "pictures", place / "encoder", tmp_path / "embedded")
    assert len(list((tmp_path / "embedded").glob("0*.safetensors"))) == 4
    rows = torch.tensor([179, 0, 49, 50, 149, 150, 0])
    one, several = EmbeddedSet(place / "embedded")[rows], EmbeddedSet(tmp_path / "embedded")[rows]
    assert (one.float() - several.float()).abs().max() < 2e-3  # their batches differ in size


def test_a_stopped_run_goes_on_after_its_last_whole_file(place, tmp_path, monkeypatch):
    monkeypatch.setattr(captions, "SHARD", 50)
    given = (place / "pictures", place / "encoder")
    told = "60 of 180 captions are longer than 6 tokens"
    with pytest.warns(UserWarning, match=told):
        embed(*given, tmp_path / "whole", length=6, batch=20)

    def interrupt(done: int) -> None:
        if done > 120:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed(*given, tmp_path / "set", length=6, batch=20, progress=interrupt)
    assert not (tmp_path / "set").exists()
    for left in (".begun.json.0123abcd.tmp", "00002.safetensors"):  # by a kill while they were written
        (tmp_path / ".set.tmp" / left).write_bytes(b"torn")
    done: list[int] = []
    with pytest.warns(UserWarning, match=told):  # those of the first run are counted too
        assert embed(*given, tmp_path / "set", length=6, batch=20, progress=done.append) == 180
    assert done == [120, 140, 150, 170, 180]
    assert content(tmp_path / "set") == content(tmp_path / "whole")
    assert not (tmp_path / ".set.tmp").exists()


@pytest.mark.parametrize("change", ["length", "encoder", "captions", "a bit"])
def test_what_a_stopped_run_left_of_another_set_is_not_gone_on_with(place, tmp_path, monkeypatch, change):
    monkeypatch.setattr(captions, "SHARD", 50)
    shutil.copytree(place / "pictures", tmp_path / "pictures")
    options = {"length": 7 if change == "length" else 8}
    encoder = write_encoder(tmp_path / "other", seed=1) if change == "encoder" else place / "encoder"
    with pytest.raises(ZeroDivisionError):
        embed(tmp_path / "pictures", place / "encoder", tmp_path / "set", progress=lambda done: 1 // (done < 120))
    if change == "captions":
        file = tmp_path / "pictures" / "captions.jsonl"
        file.write_text(file.read_text().replace("red", "blue"))
    if change == "a bit":
        with (tmp_path / ".set.tmp" / "00000.safetensors").open("r+b") as file:
            file.seek(5000)
            file.write(b"x")
    embed(tmp_path / "pictures", encoder, tmp_path / "set", **options)
    embed(tmp_path / "pictures", encoder, tmp_path / "anew", **options)
    assert content(tmp_path / "set") == content(tmp_path / "anew")


def test_captions_of_any_characters_come_back(place, tmp_path):
    pictures = write_shapes(tmp_path / "pictures", 2)
    words = ["a red\u2028circle", "a \x85 blue\u2029square \x1e"]  # line ends for Python, and for JSON none
    lines = [json.dumps({"file": f"{i}.png", "caption": caption}, ensure_ascii=False) for i, caption in enumerate(words)]
    (pictures / "captions.jsonl").write_text("\ufeff" + "\r\n".join(lines).replace("\x1e", "\\u001e"), encoding="utf-8", newline="")
    assert embed(pictures, place / "encoder", tmp_path / "set") == 2
    assert [caption for _, caption in EmbeddedSet(tmp_path / "set").rows] == words


def test_captions_that_are_too_long_are_counted(place, tmp_path):
    with pytest.warns(UserWarning, match="120 of 180 captions are longer than 5 tokens"):  # "a red circle" has just five
        embed(place / "pictures", place / "encoder", tmp_path / "embedded", length=5)
    assert EmbeddedSet(tmp_path / "embedded").length == 5


# --- what is read back --------------------------------------------------------------------------------------------------------------------


def told(place) -> dict[bytes, str]:
    """Every caption by its embedding, as it is told."""
    embedded = EmbeddedSet(place / "embedded")
    return {row.numpy().tobytes(): words for row, (_, words) in zip(embedded[torch.arange(180)], embedded.rows, strict=True)}


def test_every_picture_comes_with_a_caption_of_its_own(place):
    words, seen = told(place), []
    stream = batches(load(f"captions:{place / 'embedded'}"), 50, seed=0)
    for _ in range(6):
        x0, text = next(stream)
        assert text.shape == (50, 8, 16)
        mine = [words[row.numpy().tobytes()] for row in text]
        shown = judged(((x0 + 1) * 127.5).round().byte())
        seen += [next(i for i, wording in enumerate(WORDINGS) if wording.format(*kind) == line) for kind, line in zip(shown, mine, strict=True)]
    # 300 draws of three wordings: 100 ± 8.2 each, five times that
    assert all(abs(seen.count(i) - 100) < 41 for i in range(3))


def test_captions_follow_from_seed_and_place(place):
    data = load(f"captions:{place / 'embedded'}")
    stream = batches(data, 8, seed=3)
    four = [next(stream)[1] for _ in range(4)]
    assert torch.equal(next(batches(data, 8, seed=3, start=2))[1], four[2])
    assert torch.equal(next(batches(data, 8, seed=3, start=1, rank=1, world_size=2))[1], four[3])
    assert not torch.equal(next(batches(data, 8, seed=4))[1], four[0])


def test_pictures_on_disk_give_the_same(place, monkeypatch):
    name = f"captions:{place / 'embedded'}"
    memory = load(name)
    monkeypatch.setattr(lab_data, "IN_MEMORY", 0)
    disk = load(name)
    assert isinstance(disk, Files)
    for ours, theirs in zip(next(batches(memory, 16, seed=1)), next(batches(disk, 16, seed=1, workers=0)), strict=True):
        assert torch.equal(ours, theirs)


def test_held_out_captions_belong_to_held_out_pictures(place):
    name, words = f"captions:{place / 'embedded'}", told(place)
    held_out, data = load(name, split="test"), load(name)
    x0, text = head(held_out, 10)
    shown = judged(((x0 + 1) * 127.5).round().byte())
    first = [WORDINGS[0].format(*kind) for kind in shown]
    assert [words[row.numpy().tobytes()] for row in text] == first
    for split in (held_out, data):
        assert [words[row.numpy().tobytes()] for row in split.texts.held_out(len(first))] == first
        assert split.texts.held_out_words(len(first) + 1) == [*first, first[0]]


def test_a_test_folder_of_its_own_is_found(tmp_path, place):
    for name, n in (("train", 12), ("val", 5)):
        write_shapes(tmp_path / "set" / name, n)
    lines = [
        json.dumps({**json.loads(line), "file": f"./{name}/{json.loads(line)['file']}"})
        for name in ("train", "val")
        for line in (tmp_path / "set" / name / "captions.jsonl").read_text().splitlines()
    ]
    (tmp_path / "set" / "captions.jsonl").write_text("\n".join(lines))
    embed(tmp_path / "set", place / "encoder", tmp_path / "embedded")
    train, test = (load(f"captions:{tmp_path / 'embedded'}", split=split) for split in ("train", "test"))
    assert (len(train), len(test)) == (12, 5)
    assert sorted(train.texts.held_out_words(5)) == sorted(WORDINGS[0].format(*kind) for kind in KINDS[:5])


# --- mistakes -----------------------------------------------------------------------------------------------------------------------------


def test_mistakes_in_captions_are_named(place, tmp_path):
    encoder, pictures = place / "encoder", write_shapes(tmp_path / "pictures", 4)
    file = pictures / "captions.jsonl"
    good = file.read_text()
    for text, message in (
        ("\n\n", "is empty"),
        ('{"file": "0.png"}', "line 1 of .* should read"),
        (good + '\n{"file": "0.png", "caption": []}', "line 5 of"),
        (good + "\nnonsense", "line 5 of"),
        (good + '\n{"file": "9.png", "caption": "a red circle"}', "names 1 files that are not there, the first is 9.png"),
    ):
        file.write_text(text)
        with pytest.raises(Mistake, match=message):
            embed(pictures, encoder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    file.write_bytes(good.encode() + b'\n{"file": "0.png", "caption": "caf\xe9"}')
    with pytest.raises(Mistake, match=r"captions.jsonl is not text in UTF-8 \(.* at byte \d+\); save it in UTF-8"):
        embed(pictures, encoder, tmp_path / "out")
    file.unlink()
    with pytest.raises(Mistake, match=r"there is no .*captions.jsonl"):
        embed(pictures, encoder, tmp_path / "out")
    file.write_text(good.splitlines()[0])
    embed(pictures, encoder, tmp_path / "out")
    with pytest.raises(Mistake, match="is there already"):
        embed(pictures, encoder, tmp_path / "out")
    with pytest.raises(Mistake, match=r"pictures of .* have no caption in .*; embed anew"):
        load(f"captions:{tmp_path / 'out'}")


def test_mistakes_in_encoders_are_named(place, tmp_path, monkeypatch):
    with pytest.raises(Mistake, match="there is no folder"):
        Encoder(tmp_path / "nowhere")
    with pytest.raises(Mistake, match=r"holds no config.json"):
        Encoder(tmp_path)
    for text, message in (
        ("{}", "does not name a model_type"),
        ('{"model_type": "bert"}', "'bert', which is no known text encoder; known: clip"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(Mistake, match=message):
            Encoder(tmp_path)
    for missing, message in (("model.safetensors", "cannot load a CLIPTextModel"), ("tokenizer.json", "cannot load a tokenizer")):
        broken = tmp_path / missing.partition(".")[0]
        shutil.copytree(place / "encoder", broken)
        (broken / missing).unlink()
        with pytest.raises(Mistake, match=message):
            Encoder(broken)
    with pytest.raises(Mistake, match="takes captions of 2 to 8"):
        Encoder(place / "encoder", length=9)
    endless = write_encoder(tmp_path / "endless", "t5")
    write_tokenizer(endless, 10**30)
    with pytest.raises(Mistake, match="give the length in tokens"):
        Encoder(endless)
    assert Encoder(endless, length=20).length == 20
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Mistake, match=r"pip install noiseclock\[text\]"):
        Encoder(place / "encoder")


def test_an_encoder_without_all_its_weights_is_refused(place, tmp_path):
    from safetensors.torch import save_file

    shutil.copytree(place / "encoder", tmp_path / "encoder")
    file = tmp_path / "encoder" / "model.safetensors"
    weights = load_file(file)
    weights.pop(next(name for name in weights if name.endswith("final_layer_norm.weight")))
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(Mistake, match="lacks 1 of its weights"):
        Encoder(tmp_path / "encoder")


def test_damaged_and_lost_files_are_named(place, tmp_path):
    shutil.copytree(place, tmp_path / "set")
    folder = tmp_path / "set" / "embedded"
    with (folder / "00000.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    data = load(f"captions:{folder}")
    with pytest.raises(Mistake, match=r"00000.safetensors is missing or damaged"):
        next(batches(data, 2, seed=0))
    shutil.rmtree(tmp_path / "set" / "pictures")
    with pytest.raises(Mistake, match="there is no such folder"):
        load(f"captions:{folder}")
    (folder / "index.json").write_text("{}")
    with pytest.raises(Mistake, match=r"index.json is damaged"):
        load(f"captions:{folder}")
    with pytest.raises(Mistake, match="noiseclock embed PICTURES"):
        load(f"captions:{place / 'pictures'}")
    with pytest.raises(Mistake, match="lacks a path; say captions:PATH"):
        load("captions:")
