"""Archives, images and cache files that someone damaged or made up: one line, or built again."""

import io
import lzma
import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_files import class_files, encode, mask_files, random_image, write_archive, write_folder
from PIL import Image, PngImagePlugin

from repro import paths
from repro.datasets import CorruptDatasetError, DatasetError, archives, available, image_data, load
from repro.datasets.archives import content_hash
from repro.datasets.decoding import opened

IMAGE = "flowers5/train/ant/x.png"


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text
    return text


class TestArchives:
    def member(self, name: str = IMAGE, size: int = 0, **values: object) -> tarfile.TarInfo:
        member = tarfile.TarInfo(name)
        member.size = size
        for key, value in values.items():
            setattr(member, key, value)
        return member

    def pack(self, path: Path, extra: bytes, tail: bytes | None = None) -> Path:
        """Write a good archive with `extra`, raw tar blocks, before its end."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in class_files("flowers5", per_class=1).items():
                tar.addfile(self.member(name, len(content)), io.BytesIO(content))
        good = buffer.getvalue()
        good = good[: -(-len(good.rstrip(b"\0")) // 512) * 512]  # without its end
        path.write_bytes(lzma.compress(good + extra + (bytes(1024) if tail is None else tail)))
        return path

    CASES = (
        "..", "/", "symbolic link", "hard link", "device", "FIFO", "twice", "other top folder",
        "too large", "12 GiB", "long name", "damaged header", "second tar", "no end",
        "linked class", "linked split", "after the stream",
    )  # fmt: skip

    @pytest.mark.parametrize("case", CASES)
    def test_are_refused_in_one_line(self, tmp_path, case):
        image = encode(random_image(5))
        padded = image + bytes(-len(image) % 512)
        first = next(iter(class_files("flowers5")))
        types = {"symbolic link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE,
                 "device": tarfile.CHRTYPE, "FIFO": tarfile.FIFOTYPE}  # fmt: skip
        tail = None
        if case in types:
            extra = self.member(type=types[case], linkname=first).tobuf()
            said = "a link or a device"
        elif case in ("..", "/"):
            name = f"{'/' if case == '/' else '../'}{IMAGE}"
            extra, said = self.member(name, len(image)).tobuf() + padded, "leads out of it"
        elif case in ("twice", "other top folder"):
            name = first if case == "twice" else first.replace("flowers5", "more", 1)
            extra, said = self.member(name, len(image)).tobuf() + padded, "twice"
        elif case in ("too large", "12 GiB"):
            size = archives.MEMBER_BYTES + 1 if case == "too large" else 12 * 2**30
            extra, said = self.member(size=size).tobuf(tarfile.GNU_FORMAT), f"{size:,} bytes"
        elif case == "long name":
            # GNU's header of a name of 40 MB, which tarfile would read whole.
            long = self.member("././@LongLink", 40 * 2**20, type=tarfile.GNUTYPE_LONGNAME)
            extra, said = long.tobuf() + b"a" * (40 * 2**20), "a name in it takes more"
        elif case == "damaged header":
            extra = self.member(size=len(image)).tobuf().replace(b"ant", b"and") + padded
            said = "something else follows"
        elif case == "second tar":
            extra, said = bytes(1024) + self.member().tobuf(), "something else follows"
        elif case in ("linked class", "linked split"):
            name = "flowers5/train/c" if case == "linked class" else "flowers5/val"
            extra = self.member(name, type=tarfile.SYMTYPE, linkname="/etc").tobuf()
            said = "a link or a device"
        elif case == "after the stream":
            extra, said = b"", "something else follows the end of its compressed stream"
        else:
            extra, tail, said = b"", b"", "breaks off"
        path = self.pack(tmp_path / "flowers5.tar.xz", extra, tail)
        if case == "after the stream":
            path.write_bytes(path.read_bytes() + b"something more")
        with pytest.raises(CorruptDatasetError, match=said) as caught:
            load("flowers5", tmp_path)
        assert str(path) in one_line(caught.value)
        assert not list((tmp_path / "cache").glob("*.pt"))

    def test_a_good_one_is_not(self, tmp_path):
        for number, tail in enumerate((None, bytes(1024 + 10240 * 7), bytes(512))):
            self.pack(tmp_path / "flowers5.tar.xz", b"", tail)
            assert len(load("flowers5", tmp_path).train) == 2, number
        notes = self.member("flowers5/notes", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        self.pack(tmp_path / "flowers5.tar.xz", notes.tobuf())  # no image, and not followed
        assert len(load("flowers5", tmp_path).train) == 2

    def test_bombs(self, tmp_path, monkeypatch):
        """What unpacks to a multiple of itself, and what fits no memory."""
        monkeypatch.setattr(archives, "BOMB_BYTES", 2**20)
        zeros = self.member("flowers5/zeros", 2**22).tobuf() + bytes(2**22)
        for extra, tail in ((zeros, None), (b"", bytes(2**22))):
            self.pack(tmp_path / "flowers5.tar.xz", extra, tail)
            with pytest.raises(CorruptDatasetError, match="unpacks to more than") as caught:
                load("flowers5", tmp_path)
            one_line(caught.value)
        self.pack(tmp_path / "flowers5.tar.xz", b"")
        monkeypatch.setattr(archives, "memory_bytes", lambda: 500)
        with pytest.raises(CorruptDatasetError, match="more than this machine's memory"):
            load("flowers5", tmp_path)

    def test_two_masks_of_one_image(self, tmp_path):
        files = mask_files("camvid")
        files["camvid/test/masks/1.jpg"] = files["camvid/test/masks/1.png"]
        write_archive(tmp_path / "camvid.tar.xz", files)
        with pytest.raises(CorruptDatasetError, match="are masks of one image"):
            load("camvid", tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "circle"])
def test_what_is_named_as_an_image_and_is_none(tmp_path, kind):
    write_folder(tmp_path, class_files("flowers5"))
    place = tmp_path / IMAGE
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":  # which opening would wait for
        os.mkfifo(place)
    else:
        place.symlink_to(place.name)
    with pytest.raises(CorruptDatasetError, match=r"x\.png is named as an image and is no file"):
        load("flowers5", tmp_path)


def test_linked_folders_are_entered(tmp_path):
    write_folder(tmp_path, class_files("flowers5"))
    for split in ("train", "test"):
        there = sorted((tmp_path / "flowers5" / split).iterdir())[0]
        (tmp_path / f"{split}-elsewhere").mkdir()
        moved = there.rename(tmp_path / f"{split}-elsewhere" / there.name)
        there.symlink_to(moved)
    linked = load("flowers5", tmp_path)
    write_folder(tmp_path / "plain", class_files("flowers5"))
    plain = load("flowers5", tmp_path / "plain")
    assert linked.classes == plain.classes and linked.fingerprint == plain.fingerprint


@pytest.mark.parametrize("name", ["flowers5", "div2k"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "broken link"])
def test_what_is_named_as_an_archive_and_is_none(tmp_path, name, kind):
    """It is not passed over for a stand-in."""
    place = tmp_path / f"{name}.tar.xz"
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/nowhere")
    with pytest.raises(CorruptDatasetError, match="is named as an archive and is no file"):
        available(tmp_path)
    with pytest.raises(CorruptDatasetError, match="is named as an archive and is no file"):
        load(name, tmp_path)


@pytest.mark.parametrize("name", ["div2k", "carvana"])
def test_a_pipe_in_the_folder_of_another_project_is_not_waited_for(tmp_path, name):
    parts = {"div2k": ("DIV2K_train_HR", "DIV2K_valid_HR"), "carvana": ("train", "train_masks")}
    for part in parts[name]:
        (tmp_path / part).mkdir()
        os.mkfifo(tmp_path / part / f"a_1.{'png' if name == 'div2k' else 'jpg'}")
    if name == "carvana":
        for car in range(5):  # the pipe is not among what is hashed
            (tmp_path / "train_masks" / f"{car}_1_mask.gif").write_bytes(b"x")
            (tmp_path / "train" / f"{car}_1.jpg").write_bytes(b"x")
        (tmp_path / "train_masks" / "a_1_mask.gif").write_bytes(b"x")
        (tmp_path / "train" / "0_1.jpg").unlink()
        os.mkfifo(tmp_path / "train" / "0_1.jpg")
    with pytest.raises(CorruptDatasetError, match=r"_1\.(png|jpg) is no file"):
        load(name, tmp_path)


class TestImages:
    def refused(self, content: bytes) -> str:
        with (
            pytest.raises(CorruptDatasetError) as caught,
            opened("set: a.jpg", content) as image,
        ):
            image.convert("RGB")
        text = one_line(caught.value)
        assert text.startswith("set: a.jpg ")
        return text

    def test_a_postscript_named_jpg_calls_no_program(self, tmp_path, monkeypatch):
        monkeypatch.setattr(subprocess, "Popen", None)
        buffer = io.BytesIO()
        Image.fromarray(random_image(0)).save(buffer, "EPS")
        assert "none of JPEG, PNG" in self.refused(buffer.getvalue())
        for name, place in (("flowers5", "train/ant/x.jpg"), ("bsds500", "train/x.jpg")):
            good = "flowers5/test/ant/y.png" if name == "flowers5" else "bsds500/test/y.png"
            files = {f"{name}/{place}": buffer.getvalue(), good: encode(random_image(1))}
            write_archive(tmp_path / f"{name}.tar.xz", files)
            for size in (None, 8):
                with pytest.raises(CorruptDatasetError, match=r"x\.jpg cannot be decoded"):
                    load(name, tmp_path, image_size=size)

    def test_every_image_is_opened_so(self):
        calls = [text for path in paths.PACKAGE.rglob("*.py")
                 for text in path.read_text(encoding="utf-8").split("Image.open(")[1:]]  # fmt: skip
        assert len(calls) == 2  # this, and the report's own picture
        assert all("formats=" in text.partition("\n")[0] for text in calls)

    @pytest.mark.parametrize("form", ["JPEG", "PNG", "PPM", "TIFF", "BMP", "GIF", "WEBP"])
    def test_what_is_read(self, form):
        pixels = np.full((4, 6, 3), 255, np.uint8)
        with opened("a", encode(pixels, form)) as image:
            assert np.array_equal(np.asarray(image.convert("RGB")), pixels)

    @pytest.mark.parametrize("form", ["ICO", "TGA", "PCX", "SGI", "PDF"])
    def test_what_is_not(self, form):
        assert "none of" in self.refused(encode(random_image(0), form))

    @pytest.mark.parametrize("times", [1.5, 3])
    def test_a_bomb_is_refused_before_it_is_decoded(self, times):
        """PIL only warns of up to twice its limit."""
        side = int((times * Image.MAX_IMAGE_PIXELS) ** 0.5)
        header = io.BytesIO()
        PngImagePlugin.putchunk(
            header, b"IHDR", side.to_bytes(4, "big") * 2, bytes([8, 2, 0, 0, 0])
        )
        PngImagePlugin.putchunk(header, b"IDAT", b"")
        bomb = b"\x89PNG\r\n\x1a\n" + header.getvalue()
        assert "more than 89,478,485 pixels" in self.refused(bomb)

    def test_a_strip_is_not_enlarged_without_end(self, tmp_path):
        """Resized to 224 on its short side, a line of 20,000 pixels would have 10⁹."""
        files = class_files("flowers5") | {IMAGE: encode(random_image(0, 1, 20_000))}
        write_folder(tmp_path, files)
        with pytest.raises(DatasetError, match="image_size= makes 4480000x224 pixels"):
            load("flowers5", tmp_path, image_size=224)

    def test_truncated_and_flipped_ones_raise_nothing_else(self):
        """Whatever the decoder makes of a damaged file, it is pixels or this error."""
        random = np.random.default_rng(0)
        for form in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "WEBP", "PPM"):
            good = encode(random_image(1, 16, 16), form)
            for _ in range(40):
                bad = bytearray(good[: random.integers(1, len(good) + 1)])
                bad[random.integers(len(bad))] ^= 1 << random.integers(8)
                try:
                    with opened("x", bytes(bad)) as image:
                        image.convert("RGB")
                except CorruptDatasetError:
                    pass
                except UserWarning as warning:  # TIFF's, an error in tests alone
                    assert form == "TIFF", warning

    def test_memory(self, tmp_path, monkeypatch):
        write_archive(tmp_path / "bsds500.tar.xz", {
            f"bsds500/{split}/{k}.png": encode(random_image(k))
            for split in ("train", "test") for k in range(3)})  # fmt: skip
        write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5"))
        monkeypatch.setattr(image_data, "memory_bytes", lambda: 500)
        for name in ("bsds500", "flowers5", "synthetic", "phantom", "photos"):
            with pytest.raises(DatasetError, match="GB of memory") as caught:
                load(name, tmp_path)
            one_line(caught.value)


class TestCache:
    """What was decoded is what comes back, or is decoded again."""

    @pytest.fixture
    def data(self, tmp_path):
        write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5", per_class=20))
        return load("flowers5", tmp_path)

    def cache(self, tmp_path) -> Path:
        (path,) = (tmp_path / "cache").glob("*.pt")
        return path

    def replace(self, path: Path, content: bytes) -> None:
        path.unlink()  # a mapped file is replaced, not overwritten
        path.write_bytes(content)

    def check(self, tmp_path, data, caplog) -> None:
        """It is decoded again with one line of a warning, and then stands."""
        caplog.clear()
        again = load("flowers5", tmp_path)
        assert torch.equal(again.train.images, data.train.images)
        assert torch.equal(again.test.labels, data.test.labels)
        assert (again.classes, again.fingerprint) == (data.classes, data.fingerprint)
        (record,) = caplog.records
        assert "decoding again" in one_line(AssertionError(record.getMessage()))
        load("flowers5", tmp_path)
        assert len(caplog.records) == 1

    def test_a_flipped_bit_anywhere(self, tmp_path, data, caplog):
        path = self.cache(tmp_path)
        content, random = path.read_bytes(), np.random.default_rng(0)
        # Bytes in the padding of the zip or in its own directory may stand for nothing.
        start = content.index(data.train.images.numpy().tobytes()[:64])
        for offset in start + random.integers(0, data.train.images.numel(), 12):
            flipped = bytearray(content)
            flipped[offset] ^= 1 << random.integers(8)
            self.replace(path, bytes(flipped))
            self.check(tmp_path, data, caplog)

    def test_a_change_while_the_process_lives(self, tmp_path, data, caplog):
        """It was compared before, and is compared again, whatever time it is given."""
        path = self.cache(tmp_path)
        kept, times = data.train.images.clone(), path.stat()
        offset = path.read_bytes().index(kept.numpy().tobytes()[:64])
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([int(kept.flatten()[0]) ^ 255]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert torch.equal(load("flowers5", tmp_path).train.images, kept)
        assert len(caplog.records) == 1

    @pytest.mark.parametrize(
        "change", ["inverted", "labels", "classes", "splits", "no digest", "renamed", "no dict"]
    )
    def test_another_content_under_the_right_name(self, tmp_path, data, caplog, change):
        path = self.cache(tmp_path)
        state = torch.load(path, weights_only=True)
        train, test = (state["splits"][name] for name in ("train", "test"))
        if change == "inverted":
            train["images"] = 255 - train["images"]
        elif change == "labels":
            test["labels"] = test["labels"].flip(0)
        elif change == "classes":
            state["classes"].reverse()
        elif change == "splits":
            state["splits"] = {"train": test, "test": train}
        elif change == "no digest":  # of an earlier version
            del state["digest"]
        elif change == "renamed":  # another set's, whole and with its digest
            other = tmp_path / "other"
            write_archive(other / "flowers5.tar.xz", class_files("flowers5", per_class=2))
            load("flowers5", other)
            (foreign,) = (p for p in (tmp_path / "cache").glob("*.pt") if p != path)
            state = torch.load(foreign, weights_only=True)
            foreign.unlink()
        else:
            state = [1, 2]
        path.unlink()
        torch.save(state, path)
        self.check(tmp_path, data, caplog)

    def test_a_pickle_is_not_run(self, tmp_path, data, caplog):
        class Evil:
            def __reduce__(self):
                return (Path(tmp_path / "run").touch, ())

        path = self.cache(tmp_path)
        path.unlink()
        torch.save({"classes": Evil(), "splits": {}}, path)
        self.check(tmp_path, data, caplog)
        assert not (tmp_path / "run").exists()

    def test_where_nothing_can_be_kept_nothing_is_decoded(self, tmp_path, data, monkeypatch):
        path = self.cache(tmp_path)
        path.unlink()
        os.mkfifo(path)
        monkeypatch.setattr("repro.datasets.sources.read_archive", None)
        with pytest.raises(DatasetError, match=r"It is a pipe.*\$REPRO_CACHE") as caught:
            load("flowers5", tmp_path)
        one_line(caught.value)

    def test_a_hash_that_is_remembered_wrongly(self, tmp_path, data):
        """A digit of it decides the fingerprint: it is checked, and made anew."""
        (memory,) = (tmp_path / "cache" / "hashes").iterdir()
        text = memory.read_text()
        for bad in ("0" + text[1:], text.split()[0], "", "x y", "\udcff"):
            memory.write_bytes(bad.encode(errors="surrogateescape"))
            assert load("flowers5", tmp_path).fingerprint == data.fingerprint
            assert memory.read_text() == text

    def test_other_content_with_the_time_of_the_old(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"old")
        first, times = content_hash([path], tmp_path), path.stat()
        path.write_bytes(b"new")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert path.stat().st_mtime_ns == times.st_mtime_ns
        assert content_hash([path], tmp_path) != first

    def test_a_name_that_is_not_utf8(self, tmp_path):
        files = class_files("flowers5")
        write_folder(tmp_path, files)
        for split in ("train", "test"):
            (tmp_path / "flowers5" / split / "ant").rename(
                os.fsdecode(bytes(tmp_path / "flowers5" / split) + b"/\xff")
            )
        assert load("flowers5", tmp_path).classes[1] == "\udcff"
