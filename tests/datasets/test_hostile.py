"""Archives, images and cache files that someone damaged or made up: one line, or built again."""

import io
import lzma
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_files import class_files, encode, random_image, write, write_folder
from PIL import Image, PngImagePlugin

from repro import paths
from repro.datasets import CorruptDatasetError, DatasetError, archives, available, image_data, load
from repro.datasets.decoding import opened

IMAGE = "flowers5/train/ant/x.png"


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text
    return text


def member(name: str = IMAGE, size: int = 0, **values: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size = size
    for key, value in values.items():
        setattr(made, key, value)
    return made


def refused() -> Iterator[tuple[str, bytes, bytes, str]]:
    """Yield names, raw tar blocks before the end of a good archive, the end, and what is said."""
    end, image = bytes(1024), encode(random_image(5))
    padded, first = image + bytes(-len(image) % 512), next(iter(class_files()))
    for kind, code in (("symbolic link", tarfile.SYMTYPE), ("hard link", tarfile.LNKTYPE),
                       ("device", tarfile.CHRTYPE), ("FIFO", tarfile.FIFOTYPE)):  # fmt: skip
        yield kind, member(type=code, linkname=first).tobuf(), end, "a link or a device"
    link = member("flowers5/train/c", type=tarfile.SYMTYPE, linkname="/etc")
    yield "linked folder", link.tobuf(), end, "a link or a device"
    for kind, name, said in (
        ("..", f"../{IMAGE}", "leads out of it"), ("/", f"/{IMAGE}", "leads out of it"),
        ("twice", first, "twice"), ("other top folder", first.replace("flowers5", "more"), "twice"),
    ):  # fmt: skip
        yield kind, member(name, len(image)).tobuf() + padded, end, said
    yield "too long", member(size=12 * 2**30).tobuf(tarfile.GNU_FORMAT), end, "damaged"
    # GNU's header of a name of 4 MB, without its file.
    long = member("././@LongLink", 2**22, type=tarfile.GNUTYPE_LONGNAME).tobuf() + b"a" * 2**22
    yield "long name", long, end, "damaged or incomplete"
    sparse = member(type=tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT)
    yield "sparse file", sparse, end, "a link or a device"
    damaged = member(size=len(image)).tobuf().replace(b"ant", b"and") + padded
    yield "damaged header", damaged, end, "something else follows"
    yield "second tar", end + member().tobuf(), end, "something else follows"
    yield "no end", b"", b"", "breaks off"


class TestArchives:
    def pack(self, tmp_path: Path, extra: bytes = b"", tail: bytes = bytes(1024)) -> Path:
        """Write a good archive with `extra`, raw tar blocks, before its end."""
        buffer, path = io.BytesIO(), tmp_path / "flowers5.tar.xz"
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in class_files(per_class=1).items():
                tar.addfile(member(name, len(content)), io.BytesIO(content))
        good = buffer.getvalue()
        good = good[: -(-len(good.rstrip(b"\0")) // 512) * 512]  # without its end
        path.write_bytes(lzma.compress(good + extra + tail))
        return path

    def refuse(self, tmp_path: Path, said: str) -> None:
        with pytest.raises(CorruptDatasetError, match=said) as caught:
            load("flowers5", tmp_path)
        assert str(tmp_path / "flowers5.tar.xz") in one_line(caught.value)
        assert not list((tmp_path / "cache").glob("*.pt"))

    @pytest.mark.parametrize("case", [*refused()], ids=lambda case: case[0])
    def test_are_refused_in_one_line(self, tmp_path, case):
        _, extra, tail, said = case
        self.pack(tmp_path, extra, tail)
        self.refuse(tmp_path, said)

    def test_what_is_cut(self, tmp_path):
        path = self.pack(tmp_path)
        content = path.read_bytes()
        for kept in (0.0, 0.5, 0.999):
            path.write_bytes(content[: int(len(content) * kept)])
            self.refuse(tmp_path, r"flowers5\.tar\.xz is damaged.*delete it")

    def test_a_good_one_is_not(self, tmp_path):
        folder = member("flowers5/train/ant", type=tarfile.DIRTYPE).tobuf()
        for extra, end in ((b"", 1024 + 10240 * 7), (b"", 512), (folder, 1024)):
            self.pack(tmp_path, extra, bytes(end))
            assert len(load("flowers5", tmp_path).train) == 2, (extra, end)

    def test_bombs(self, tmp_path, monkeypatch):
        """What unpacks to a multiple of itself, and what fits no memory."""
        monkeypatch.setattr(archives, "BOMB_BYTES", 2**20)
        zeros = member("flowers5/zeros", 2**22).tobuf() + bytes(2**22)
        for extra, end in ((zeros, 1024), (b"", 2**22)):
            self.pack(tmp_path, extra, bytes(end))
            self.refuse(tmp_path, "unpacks to more than")
        self.pack(tmp_path)
        monkeypatch.setattr(archives, "memory_bytes", lambda: 500)
        self.refuse(tmp_path, "unpacks to more than 500 bytes")


def put(place: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":  # which opening would wait for
        os.mkfifo(place)
    else:
        place.symlink_to(place.name)  # a circle, which leads nowhere


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_named_as_an_image_or_archive_and_is_none(tmp_path, kind):
    """It is not passed over for a stand-in, or for a folder of the same name."""
    write_folder(tmp_path, class_files())
    put(tmp_path / IMAGE, kind)
    with pytest.raises(CorruptDatasetError, match=r"x\.png is no file"):
        load("flowers5", tmp_path)
    for name in ("flowers5", "div2k"):
        put(tmp_path / f"{name}.tar.xz", kind)
        assert name in available(tmp_path)
        with pytest.raises(CorruptDatasetError, match=r"tar\.xz is no file"):
            load(name, tmp_path)


FORMS = ("JPEG", "PNG", "PPM", "TIFF", "BMP", "GIF", "WEBP")


class TestImages:
    def refused(self, content: bytes) -> str:
        refuses = pytest.raises(CorruptDatasetError, match=r"^set: a\.jpg ")
        with refuses as caught, opened("set: a.jpg", content) as image:
            image.convert("RGB")
        return one_line(caught.value)

    def test_a_postscript_named_jpg_calls_no_program(self, tmp_path, monkeypatch):
        monkeypatch.setattr(subprocess, "Popen", None)
        bad, good = encode(random_image(0), "EPS"), encode(random_image(1))
        assert "none of JPEG, PNG" in self.refused(bad)
        for name, part in (("flowers5", "/ant"), ("bsds500", "")):
            write(tmp_path, {f"{name}/train{part}/x.jpg": bad, f"{name}/test{part}/y.png": good})
            for size in (None, 8):
                with pytest.raises(CorruptDatasetError, match=r"x\.jpg cannot be decoded"):
                    load(name, tmp_path, image_size=size)

    def test_every_image_is_opened_so(self):
        calls = [text for path in paths.PACKAGE.rglob("*.py")
                 for text in path.read_text(encoding="utf-8").split("Image.open(")[1:]]  # fmt: skip
        assert len(calls) == 2  # this, and the report's own picture
        assert all("formats=" in text.partition("\n")[0] for text in calls)

    def test_what_is_read_and_what_is_not(self):
        pixels = np.full((4, 6, 3), 255, np.uint8)
        for form in FORMS:
            with opened("a", encode(pixels, form)) as image:
                assert np.array_equal(np.asarray(image.convert("RGB")), pixels)
        for form in ("ICO", "TGA", "PCX", "SGI", "PDF"):
            assert "none of" in self.refused(encode(pixels, form))

    @pytest.mark.parametrize("times", [1.5, 3])
    def test_a_bomb_is_refused_before_it_is_decoded(self, times):
        """PIL only warns of up to twice its limit."""
        side = int((times * Image.MAX_IMAGE_PIXELS) ** 0.5)
        header, shape = io.BytesIO(), side.to_bytes(4, "big") * 2
        PngImagePlugin.putchunk(header, b"IHDR", shape, bytes([8, 2, 0, 0, 0]))
        PngImagePlugin.putchunk(header, b"IDAT", b"")
        bomb = b"\x89PNG\r\n\x1a\n" + header.getvalue()
        assert "more than 89,478,485 pixels" in self.refused(bomb)

    def test_a_strip_is_not_enlarged_without_end(self, tmp_path):
        """Resized to 224 on its short side, a line of 20,000 pixels would have 10⁹."""
        write_folder(tmp_path, class_files() | {IMAGE: encode(random_image(0, 1, 20_000))})
        with pytest.raises(DatasetError, match="image_size= makes 4480000x224 pixels"):
            load("flowers5", tmp_path, image_size=224)

    def test_truncated_and_flipped_ones_raise_nothing_else(self):
        """Whatever the decoder makes of a damaged file, it is pixels or this error."""
        random = np.random.default_rng(0)
        for form in FORMS:
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
        picture = encode(random_image(0, 20, 20))
        write(tmp_path, {f"bsds500/{split}/0.png": picture for split in ("train", "test")})
        write(tmp_path, class_files())
        monkeypatch.setattr(image_data, "memory_bytes", lambda: 500)
        for name in ("bsds500", "flowers5", "phantom", "photos"):
            with pytest.raises(DatasetError, match="GB of memory") as caught:
                load(name, tmp_path)
            one_line(caught.value)


class TestCache:
    """What was decoded is what comes back, or is decoded again."""

    @pytest.fixture
    def data(self, tmp_path):
        return load("flowers5", write(tmp_path, class_files(per_class=20)))

    def cache(self, tmp_path) -> Path:
        (path,) = (tmp_path / "cache").glob("*.pt")
        return path

    def check(self, tmp_path, data, caplog) -> None:
        """It is decoded again with one line of a warning, and kept."""
        caplog.clear()
        again = load("flowers5", tmp_path)
        assert torch.equal(again.train.images, data.train.images)
        assert torch.equal(again.test.labels, data.test.labels)
        assert (again.classes, again.fingerprint) == (data.classes, data.fingerprint)
        (record,) = caplog.records
        assert "decoding again" in one_line(AssertionError(record.getMessage()))
        load("flowers5", tmp_path)
        assert len(caplog.records) == 1

    def test_damaged_bytes(self, tmp_path, data, caplog):
        path = self.cache(tmp_path)
        content, random = path.read_bytes(), np.random.default_rng(0)
        # Bytes in the padding of the zip or in its own directory may be of no importance.
        start = content.index(data.train.images.numpy().tobytes()[:64])
        damaged = [content[: len(content) // 2], b"\x80" * 500, b""]
        for offset in start + random.integers(0, data.train.images.numel(), 6):
            damaged.append(bytearray(content))
            damaged[-1][offset] ^= 1 << random.integers(8)
        for bad in damaged:
            path.unlink()  # a mapped file is replaced, not overwritten
            path.write_bytes(bytes(bad))
            self.check(tmp_path, data, caplog)

    def test_another_content_under_the_right_name(self, tmp_path, data, caplog):
        path = self.cache(tmp_path)
        content = path.read_bytes()
        for change in ("inverted", "classes", "no digest", "no dict"):
            path.unlink()
            path.write_bytes(content)
            state = torch.load(path, weights_only=True)
            if change == "inverted":
                state["splits"]["train"]["images"].bitwise_not_()
            elif change == "classes":
                state["classes"].reverse()
            elif change == "no digest":  # of an earlier version
                del state["digest"]
            path.unlink()
            torch.save([1, 2] if change == "no dict" else state, path)
            self.check(tmp_path, data, caplog)

    def test_another_set_and_a_pickle_under_the_right_name(self, tmp_path, data, caplog):
        class Evil:
            def __reduce__(self):
                return (Path(tmp_path / "run").touch, ())

        path = self.cache(tmp_path)
        load("flowers5", write(tmp_path / "other", class_files(per_class=2)))
        (foreign,) = (p for p in (tmp_path / "cache").glob("*.pt") if p != path)
        foreign.replace(path)  # whole, and with its digest
        self.check(tmp_path, data, caplog)
        path.unlink()
        torch.save({"classes": Evil(), "splits": {}}, path)
        self.check(tmp_path, data, caplog)
        assert not (tmp_path / "run").exists()
