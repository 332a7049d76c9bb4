"""Records: whole or not at all, keyed by what the result depends on, nothing ever lost."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import pandas
import pytest
from commands import command_line
from test_installed import git

from repro import paths, records
from repro.experiments import PAPERS, load_paper
from repro.records import CorruptRecordWarning, Record, RecordError, read_record

CONFIG = {"model": {"name": "unet", "width": 4}, "image_size": [8, 9], "mini_batch": 16}


@pytest.fixture
def record(make_record) -> Record:
    return make_record(
        config=CONFIG,
        metrics={"best": 97.5, "curve": [1.0, float("inf"), -0.0], "metric": "iou", "limit": None},
        timings={"epoch": {"samples_s": [0.1, 0.2], "warmup": 1}},
        peak_bytes=2**40,
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


class TestStore:
    def test_round_trip(self, store, record):
        assert store.load("mbs") == [] and not store.folder.exists()
        failed = replace(record, status="failed", error="RuntimeError: μ 'quoted'\n  line 2")
        for one in (failed, record):
            assert read_record(store.write(one)) == one and store.load("mbs") == [one]
        assert files(store.folder) == [f"train-{record.key}.json"]

    @pytest.mark.parametrize("moment", ["fsync", "replace"])
    def test_a_crash_leaves_what_stood(self, store, record, monkeypatch, moment):
        def crash(*arguments):
            raise KeyboardInterrupt

        path, new = store.write(record), replace(record, key="new")
        for write in (lambda: store.write(new), lambda: store.pack("mbs", [new])):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(os, moment, crash)
                write()
            assert store.load("mbs") == [record] and store.singles("mbs") == [path]


class TestCorruptRecords:
    CONTENTS: ClassVar = {
        "empty": b"", "truncated": None, "a list": b"[]", "a number": b"3",  # None: half of one
        "not JSON": b"accuracy: 12", "not text": b"\xff\xfe\x00",
        "another program's": b'{"accuracy": 12}', "nested without end": b"[" * 200_000,
    }  # fmt: skip

    @pytest.mark.parametrize("kind", CONTENTS)
    def test_the_error_names_the_file_and_what_to_do(self, store, record, kind):
        good, bad = store.write(record), store.write(replace(record, key="bad"))
        content = self.CONTENTS[kind]
        content = bad.read_bytes()[:-200] if content is None else content
        bad.write_bytes(content)
        with pytest.raises(RecordError) as caught:
            read_record(bad)
        assert str(bad) in str(caught.value)
        assert "move it away or delete it, then run again" in str(caught.value)
        assert len(str(caught.value)) < 2000
        # Among others it is named, and they are read.
        with pytest.warns(CorruptRecordWarning, match=bad.name):
            assert store.load("mbs") == [record]
        assert bad.read_bytes() == content and read_record(good) == record

    @pytest.mark.parametrize(
        ("field", "value"),
        [("config", None), ("config", []), ("metrics", "best"), ("timings", None), ("seed", "0"),
         ("device", None), ("device", {}), ("dataset", "digits"), ("dataset", {"name": "digits"}),
         ("finished", 3), ("versions", None), ("versions", {}), ("version", "1"), ("version", None),
         ("config", {"dataset": "flowers5"}), ("config", {"dataset": {}}), ("first_steps", {}),
         ("timings", {"epoch": 3}), ("timings", {"epoch": {}}), ("code", 3), ("seed", True),
         ("finished", "2026-01-01"), ("schema", 2), ("schema", "3"), ("status", "done"),
         ("status", ["ok"]), ("mood", "good"), ("key", ...), ("seed", 2**64)],
    )  # fmt: skip
    def test_a_field_of_another_type_or_meaning_is_named(self, store, record, field, value):
        # Whoever reads a record relies on these; the error must not come from there.
        path, content = store.write(record), asdict(record) | {field: value}
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
        with pytest.raises(RecordError, match=field if value is not ... else "it has"):
            read_record(path)


class TestPacked:
    def test_packing_changes_no_record_and_leaves_one_file(self, store, record):
        made = [replace(record, key=f"key{n}", seed=n) for n in range(5)]
        not_a_number = replace(record, key="nan", metrics={"loss": [float("nan"), 1 / 3]})
        for one in [*made, not_a_number]:
            store.write(one)
        before = store.load("mbs")
        assert store.pack("mbs") == 6 and files(store.folder) == ["mbs.jsonl.gz"]
        assert repr(store.load("mbs")) == repr(before)  # NaN differs from itself
        assert store.find("mbs", "train", "key3") == made[3]
        assert store.find("mbs", "train", "key9") is None
        assert store.where(made[3]) == store.packed("mbs")
        content = store.packed("mbs").read_bytes()
        assert store.pack("mbs") == 0 and store.packed("mbs").read_bytes() == content
        assert len(pandas.read_json(store.packed("mbs"), lines=True)) == 6

    def test_a_single_file_counts_before_the_packed_record_and_is_folded_in(self, store, record):
        store.write(record)
        store.pack("mbs")
        changed = replace(record, metrics={"best": 1.0})
        path = store.write(changed)
        assert store.load("mbs") == [changed] and store.where(changed) == path
        assert store.pack("mbs", [replace(record, key="other", paper="mbs")]) == 2
        assert sorted(r.metrics["best"] for r in store.load("mbs")) == [1.0, 97.5]
        assert not path.exists()

    def test_a_record_that_is_written_meanwhile_stays(self, store, record, monkeypatch):
        store.write(record)
        newer, line = replace(record, metrics={"best": 1.0}), records._line

        def interrupted(one):
            monkeypatch.setattr(records, "_line", line)
            os.utime(store.write(newer), ns=(0, 0))  # whatever the clock's resolution
            return line(one)

        monkeypatch.setattr(records, "_line", interrupted)
        store.pack("mbs")
        assert store.load("mbs") == [newer]

    def test_own_references_leave_the_shipped_ones_in_sight(self, record, monkeypatch, tmp_path):
        own, shipped = tmp_path / "own", tmp_path / "shipped"
        monkeypatch.setattr(paths, "reference_dirs", lambda: [shipped, own])
        other = replace(record, paper="adaptive")
        second = replace(record, key="second")
        for one in (record, other, second):
            records.RecordStore(shipped / "a-gpu" / "gpu").write(one)
        newer = replace(record, metrics={"best": 1.0})
        records.RecordStore(own / "a-gpu" / "gpu").pack("mbs", [newer])
        (store,) = records.reference_stores().values()
        assert store.load("mbs") == [newer, second] and store.load("adaptive") == [other]
        assert store.holds("adaptive") and not store.holds("microconv")
        assert store.find("mbs", second.experiment, "second") == second
        assert store.pack("mbs") == 0
        assert [store.where(one).is_relative_to(own) for one in (newer, second)] == [True, False]

    def test_two_packers_and_a_reader_at_once_lose_nothing(self, store, record):
        written = [replace(record, key=f"key{number:02}", seed=number) for number in range(40)]
        for each in written[:30]:
            store.write(each)
        script = (
            "import sys; from pathlib import Path; from repro.records import RecordStore;"
            "store = RecordStore(Path(sys.argv[1])); print(flush=True); sys.stdin.readline();"
            "[store.pack('mbs') for _ in range(20)]"
        )
        command = [sys.executable, "-W", "error", "-c", script, str(store.folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        packers = [subprocess.Popen(command, **pipes) for _ in range(2)]
        for packer in packers:
            packer.stdout.readline()
        for packer in packers:
            packer.stdin.write("\n")
            packer.stdin.flush()
        for number, each in enumerate(written[30:], 31):
            store.write(each)
            assert len(store.load("mbs")) == number
        assert [packer.communicate() and packer.returncode for packer in packers] == [0, 0]
        store.pack("mbs")
        assert [r.seed for r in store.load("mbs")] == list(range(40))

    @pytest.mark.parametrize("damage", ["empty", "no gzip", "cut", "a broken line"])
    def test_a_damaged_file_is_named_and_left_and_other_lines_are_read(self, store, record, damage):
        store.pack("mbs", [replace(record, key=f"key{n}", seed=n) for n in range(3)])
        good = store.packed("mbs").read_bytes()
        lines = gzip.decompress(good).splitlines()
        lines[1] = lines[1][:-20]
        broken = gzip.compress(b"\n".join(lines))
        contents = {"empty": b"", "no gzip": b"no gzip", "cut": good[:-9], "a broken line": broken}
        store.packed("mbs").write_bytes(contents[damage])
        single = store.write(replace(record, key="single", seed=9))
        named = "line 2 of .*" if damage == "a broken line" else ""
        with pytest.warns(CorruptRecordWarning, match=f"{named}mbs.jsonl.gz.*restore the file"):
            assert [r.seed for r in store.load("mbs")] == ([0, 2, 9] if named else [9])
        with pytest.raises(RecordError, match=f"{named}mbs.jsonl.gz cannot be read"):
            store.pack("mbs")
        assert store.packed("mbs").read_bytes() == contents[damage] and single.exists()

    def test_the_command_folds_records_into_the_reference_of_their_device(
        self, results_folder, make_record, monkeypatch, capsys
    ):
        run = command_line(monkeypatch, capsys)
        assert run("pack") == (0, "There are no new records to pack.\n", "")
        local = records.local_store("quick")
        gpu = {"type": "cuda", "name": "A GPU", "slug": "a-gpu"}
        for seed, device in ((0, make_record().device), (1, gpu)):
            local.write(make_record(seed=seed, device=device))
        records.local_store("smoke").write(make_record(seed=2))
        code, out, err = run("pack")
        assert (code, err) == (0, "") and out.count(": 1 new or newer records") == 2
        found = {where: [r.seed for r in store.load("mbs")]
                 for where, store in records.reference_stores().items()}  # fmt: skip
        assert found == {("cpu-2-cores", "quick"): [0], ("a-gpu", "quick"): [1]}
        assert len(local.load("mbs")) == 2  # they stay
        assert not list((results_folder / "reference").rglob("*.json"))
        assert "no new records to pack" in run("pack", "mbs", "mbs", "--profile", "quick")[1]
        for slug in ("../x", "", ".", "a/b"):
            local.write(make_record(seed=4, device=gpu | {"slug": slug}, key="odd"))
            code, _, err = run("pack")
            assert code == 2 and "names no folder" in err


class TestKeys:
    def test_a_key_changes_with_all_that_the_result_depends_on(self):
        base = {"paper": "mbs", "experiment": "train", "version": 1, "config": CONFIG, "seed": 0,
                "fingerprint": "f", "device": "d"}  # fmt: skip
        changes = [
            {}, {"paper": "adaptive"}, {"experiment": "size"}, {"version": 2}, {"seed": 1},
            {"config": CONFIG | {"mini_batch": 17}}, {"config": CONFIG | {"model": {"width": 5}}},
            {"config": CONFIG | {"micro_batch": None}}, {"fingerprint": "g"},
            {"fingerprint": None}, {"device": "e"}, {"device": None},
        ]  # fmt: skip
        assert len({records.record_key(**base | change) for change in changes}) == len(changes)

    def test_reference_records_have_the_keys_of_what_they_hold(self, reference_records):
        found = 0
        for store in records.reference_stores().values():
            for paper in map(load_paper, PAPERS):
                for record in store.load(paper.key):
                    experiment = paper.experiments[record.experiment]
                    machine = f"{record.device['name']}, torch {record.versions['torch']}"
                    made = {"fingerprint": (record.dataset or {}).get("fingerprint")}
                    made["device"] = machine if experiment.measured(record.config) else None
                    named = record.paper, record.experiment, record.version, record.config
                    assert record.key == records.record_key(*named, record.seed, **made)
                    found += 1
        assert found >= 2749


def test_commit_state_of_a_checkout_and_outside_one(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert records.commit_state() == (None, None)
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit, dirty = records.commit_state()
    assert len(commit) == 40 and dirty is False
    (tmp_path / "untracked").write_text("1")
    assert records.commit_state() == (commit, False)
    (tmp_path / "file").write_text("2")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # of a hook that calls it
        monkeypatch.setenv(name, str(tmp_path / "theirs"))
    assert records.commit_state() == (commit, True)
