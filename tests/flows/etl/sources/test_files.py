"""Files and archives as a source, on a real disk."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
import threading
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.testing
from conditions import patience_s, until
from logged import capture_logs
from open_watch import OpenWatch
from walking import ask, broken, records, requests, walk

from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.formats.packed_format import Compressed
from dataloader.flows.etl.sources import files
from dataloader.flows.etl.sources.files import Files
from dataloader.flows.etl.sources.source import Request, SourceError, Window

pytestmark = pytest.mark.requirement("S7")

CSV = Csv(columns=["n"])


def year(number: int) -> Window:
    return Window(datetime(number, 1, 1, tzinfo=UTC), datetime(number + 1, 1, 1, tzinfo=UTC))


def tarred(path, members: dict[str, bytes], mode: str = "w:xz"):
    with tarfile.open(path, mode) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        link = tarfile.TarInfo("link.csv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path, members: dict[str, bytes]):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


async def test_files_are_read_by_name_and_each_record_says_from_which(tmp_path):
    for name in ("b.csv", "a.csv", "c.txt"):
        (tmp_path / name).write_text(f"{name[0]}\n")
    (tmp_path / "d.csv").mkdir()
    source = Files(f"{tmp_path}/*.csv", format=CSV)
    assert records(await walk(source)) == [
        {"n": "a", "source_file": "a.csv"},
        {"n": "b", "source_file": "b.csv"},
    ]
    assert source.name is None
    assert not source.needs_answer


async def test_records_stay_as_they_are_if_they_shall_not_say_where_they_are_from(tmp_path):
    (tmp_path / "a.csv").write_text("1\n")
    assert records(await walk(Files(tmp_path / "a.csv", format=CSV, record_source=False))) == [{"n": "1"}]


async def test_several_patterns_and_paths_give_each_file_once(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("a.csv", "sub/b.csv", "sub/deep/c.csv"):
        (tmp_path / name).write_text("1\n")
    source = Files([tmp_path / "a.csv", f"{tmp_path}/*.csv", f"{tmp_path}/**/*.csv"], format=CSV)
    found = [one.endpoint.removeprefix(f"{tmp_path}/") for one in await requests(source)]
    assert found == ["a.csv", "sub/b.csv", "sub/deep/c.csv"]


async def test_a_file_or_folder_that_is_not_there_is_an_error_that_passes(tmp_path):
    for paths, error in (
        (tmp_path / "a.csv", "there is no such file"),
        (f"{tmp_path}/disk/*/x.csv", "there is no folder .*; check the disk"),
    ):
        with pytest.raises(SourceError, match=error) as caught:
            await requests(Files(paths, format=CSV))
        assert caught.value.is_retryable
    assert await requests(Files(f"{tmp_path}/*.csv", format=CSV)) == []


async def test_only_the_files_of_the_window_are_read(tmp_path):
    for name in ("yob1998.txt", "yob1999.txt", "yob2000.txt", "readme.txt"):
        (tmp_path / name).write_text("1\n")
    source = Files(f"{tmp_path}/*.txt", format=CSV, window_of=r"yob(?P<year>[0-9]{4})")

    async def names(window):
        return [one.endpoint.rpartition("/")[2] for one in await requests(source, window)]

    assert await names(year(1999)) == ["yob1999.txt"]
    assert await names(Window(year(1998).end, None)) == ["yob1999.txt", "yob2000.txt"]
    assert await names(Window()) == ["yob1998.txt", "yob1999.txt", "yob2000.txt"]
    # A file that is only partly in the window belongs to it.
    assert await names(Window(datetime(1998, 12, 31, tzinfo=UTC), datetime(1999, 1, 2, tzinfo=UTC))) == [
        "yob1998.txt",
        "yob1999.txt",
    ]
    assert await names(year(2024)) == []


@pytest.mark.parametrize(
    ("pattern", "name", "window", "is_read"),
    [
        (r"(?P<year>\d{4})-(?P<month>\d\d)", "x-2024-02.csv", ((2024, 2, 29), (2024, 3, 1)), True),
        (r"(?P<year>\d{4})-(?P<month>\d\d)", "x-2024-02.csv", ((2024, 3, 1), (2024, 3, 2)), False),
        (r"(?P<year>\d{4})-(?P<month>\d\d)", "x-2024-12.csv", ((2024, 12, 31), (2025, 1, 1)), True),
        (r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)", "2024-12-31.csv", ((2024, 12, 31), (2025, 1, 1)), True),
        (r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)", "2024-12-31.csv", ((2025, 1, 1), (2025, 1, 2)), False),
        (lambda _: Window(end=datetime(2020, 1, 1, tzinfo=UTC)), "old.csv", ((2019, 1, 1), (2021, 1, 1)), True),
        (lambda _: Window(end=datetime(2020, 1, 1, tzinfo=UTC)), "old.csv", ((2020, 1, 1), (2021, 1, 1)), False),
        (lambda _: None, "any.csv", ((2020, 1, 1), (2021, 1, 1)), False),
    ],
)
async def test_a_file_name_gives_its_month_or_day_and_a_function_any_window(tmp_path, pattern, name, window, is_read):
    (tmp_path / name).write_text("1\n")
    asked = Window(*(datetime(*day, tzinfo=UTC) for day in window))
    assert len(await requests(Files(f"{tmp_path}/*", format=CSV, window_of=pattern), asked)) == is_read


async def test_a_name_whose_numbers_are_no_date_is_an_error(tmp_path):
    (tmp_path / "2024-13.csv").write_text("1\n")
    source = Files(f"{tmp_path}/*", format=CSV, window_of=r"(?P<year>\d{4})-(?P<month>\d\d)")
    with pytest.raises(SourceError, match=r"window_of: '2024-13' in '2024-13\.csv' is not a date"):
        await requests(source)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"paths": []}, r"paths: must be a path, a pattern "),
        ({"paths": [""]}, "paths: must be .*, not .*"),
        ({"window_of": "("}, "window_of: must be a regular expression with a group"),
        ({"window_of": "(?P<month>..)"}, "window_of: must be .*, not .*"),
        ({"window_of": 5}, "window_of: must be .*, not 5"),
        ({"members": ""}, "members: must be .*, not ''"),
        ({"max_body_bytes": 0}, "max_body_bytes: must be .*, not 0"),
        ({"settled_s": -1}, "settled_s: must be a number of seconds from 0 to 3,600, not -1"),
        ({"settled_s": 3_601}, "settled_s: must be a number of seconds from 0 to 3,600, not 3601"),
        ({"settled_s": "1"}, "settled_s: must be .*, not '1'"),
    ],
)
def test_invalid_options_of_files_are_refused_at_the_declaration(options, error):
    with pytest.raises(ValueError, match=error):
        Files(**{"paths": "/data/*.csv", "format": CSV, **options})


async def test_a_file_with_more_than_the_bound_is_an_error(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"x" * 1_001)
    with pytest.raises(SourceError, match="has more than the limit of 1,000 bytes") as caught:
        await ask(Files(path, format=CSV, max_body_bytes=1_000))
    assert not caught.value.is_retryable
    assert len((await ask(Files(path, format=CSV, max_body_bytes=1_001))).body) == 1_001


async def test_a_file_that_is_gone_meanwhile_is_an_error_that_passes(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1\n")
    source = Files(path, format=CSV)
    [request] = await requests(source)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.csv: cannot be read: No such file") as caught:
        await ask(source, request)
    assert caught.value.is_retryable


async def test_a_file_that_is_written_while_it_is_read_is_an_error_that_passes(tmp_path):
    path = tmp_path / "a.csv"
    path.touch()
    # Without content on the disk, but long enough that a line is added while it is read.
    os.truncate(path, 50_000_000)
    ended = threading.Event()

    def write():
        with path.open("ab", buffering=0) as file:
            while not ended.wait(0.0005):
                file.write(b"2\n")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, write)
        try:
            with (
                trio.fail_after(patience_s()),
                pytest.raises(SourceError, match="was changed while it was read") as caught,
            ):
                await _read_again_and_again(path)
        finally:
            ended.set()
    assert caught.value.is_retryable


async def _read_again_and_again(path):
    async with Files(path, format=CSV).open() as connection:
        while True:
            await connection.fetch(Request(endpoint=str(path)), timeout_s=30)


async def test_a_disk_that_hangs_is_given_up_in_time(tmp_path):
    """A pipe without a writer hangs like a dead network disk."""
    pipe = tmp_path / "a.csv"
    os.mkfifo(pipe)
    source = Files(pipe, format=CSV)
    request = Request(endpoint=str(pipe))
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"not read within 0\.3 s") as caught:
        await ask(source, request, timeout_s=0.3)
    assert caught.value.is_retryable
    assert time.monotonic() - began < 30
    # So that the thread that was left behind can end.
    os.close(os.open(pipe, os.O_WRONLY))


@pytest.mark.slow
async def test_hanging_threads_of_a_source_are_limited_over_its_runs(tmp_path):
    pipe, other = tmp_path / "a.csv", tmp_path / "b.csv"
    os.mkfifo(pipe)
    other.write_text("1\n")
    source = Files(pipe, format=CSV)
    request = Request(endpoint=str(pipe))
    before = threading.active_count()

    async def hang():
        with pytest.raises(SourceError) as caught:
            await ask(Files(pipe, format=CSV), request, timeout_s=0.1)
        return str(caught.value)

    errors = [await hang() for _ in range(files.THREADS + 3)]
    assert errors[0] == f"{pipe}: not read within 0.1 s"
    hung = f"{pipe}: not read within 0.1 s; all 4 threads of the source wait for the disk; check it"
    assert errors[files.THREADS :] == [hung] * 3
    assert threading.active_count() - before <= files.THREADS
    assert (await ask(Files(other, format=CSV))).body == b"1\n"
    threads = files.threads_of(source)
    end = os.open(pipe, os.O_WRONLY)  # a thread that waits to open it for reading continues
    os.close(end)

    async def free():
        return threads.available_tokens

    await until(free, lambda tokens: tokens == files.THREADS)


async def test_files_that_change_between_two_looks_are_left_to_the_next_run(tmp_path, mock_clock):
    for name in ("a", "grows", "dated", "gone", "replaced"):
        (tmp_path / f"{name}.csv").write_text("1\n")

    def change():
        (tmp_path / "new.csv").write_text("1\n")
        (tmp_path / "gone.csv").unlink(missing_ok=True)
        with (tmp_path / "grows.csv").open("a") as file:
            file.write("2\n")
        os.utime(tmp_path / "dated.csv", (1, 1))
        replaced = (tmp_path / "replaced.csv").stat()
        (tmp_path / "part").write_text("2\n")
        os.utime(tmp_path / "part", ns=(replaced.st_atime_ns, replaced.st_mtime_ns))
        (tmp_path / "part").rename(tmp_path / "replaced.csv")

    def nothing(): ...

    async def listed(source, act):
        """Return the names of the files to read if `act` is called while the source waits for its second check."""
        found = []

        async def ask():
            found.extend(await requests(source))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while trio.lowlevel.current_statistics().seconds_to_next_deadline != source.settled_s:
                await trio.to_thread.run_sync(time.sleep, 0.01)
            act()
            mock_clock.jump(source.settled_s)
        return [os.path.basename(request.endpoint) for request in found]  # noqa: PTH119

    source = Files(f"{tmp_path}/*.csv", format=CSV, settled_s=8)
    assert await listed(source, change) == ["a.csv"]
    assert await listed(source, nothing) == ["a.csv", "dated.csv", "grows.csv", "new.csv", "replaced.csv"]
    with pytest.RaisesGroup(
        pytest.RaisesExc(
            SourceError, match=r"grows\.csv: was changed within the last 8 s \(settled_s\)", check=_is_retryable
        )
    ):
        await listed(Files(tmp_path / "grows.csv", format=CSV, settled_s=8), change)


def _is_retryable(error):
    return error.is_retryable


async def test_an_empty_folder_is_not_waited_for(tmp_path):
    with trio.fail_after(patience_s()):
        assert await requests(Files(f"{tmp_path}/*.csv", format=CSV, settled_s=3_600)) == []


MEMBERS = {f"2024-0{month}.csv": f"{month}\n".encode() * 3 for month in range(1, 8)}


@pytest.mark.parametrize(
    ("name", "mode"), [("a.tar.xz", "w:xz"), ("a.tar.gz", "w:gz"), ("a.tar", "w"), ("named-anything", "w:xz")]
)
async def test_each_member_of_a_tar_archive_is_a_file(tmp_path, name, mode):
    path = tarred(tmp_path / name, {**MEMBERS, "readme.txt": b"hello"}, mode)
    source = Files(path, format=CSV, members="*.csv")
    asked = await requests(source)
    assert [(one.endpoint, one.key) for one in asked] == [(str(path), member) for member in MEMBERS]
    found = records(await walk(source))
    assert [record["n"] for record in found] == [str(month) for month in range(1, 8) for _ in range(3)]
    assert found[0]["source_file"] == "2024-01.csv"


async def test_each_member_of_a_zip_archive_is_a_file(tmp_path):
    source = Files(zipped(tmp_path / "a.zip", MEMBERS), format=CSV, members="*.csv")
    assert len(records(await walk(source))) == 21


async def test_members_can_belong_to_windows_and_are_read_alone(tmp_path):
    path = tarred(tmp_path / "a.tar.xz", MEMBERS)
    source = Files(path, format=CSV, members="*", window_of=r"(?P<year>\d{4})-(?P<month>\d\d)")
    march = Window(datetime(2024, 3, 1, tzinfo=UTC), datetime(2024, 4, 1, tzinfo=UTC))
    assert [record["n"] for record in records(await walk(source, march))] == ["3", "3", "3"]


async def test_an_archive_is_unpacked_once_in_order_and_again_only_to_go_back(tmp_path):
    path = tarred(tmp_path / "a.tar.xz", MEMBERS)
    source = Files(path, format=CSV, members="*.csv")
    with OpenWatch(path) as opened:
        await _unpack(path, source, opened)


async def _unpack(path, source, opened):
    asked = await requests(source)
    assert opened.times() == 1
    with trio.fail_after(patience_s()):
        async with source.open() as connection:
            for request in asked:
                response = await connection.fetch(request, timeout_s=30)
                assert response.body == MEMBERS[request.key]
                assert response.url == f"{path}!{request.key}"
            assert opened.times() == 2
            for request in (asked[2], asked[2], asked[4]):
                assert (await connection.fetch(request, timeout_s=30)).body == MEMBERS[request.key]
            assert opened.times() == 4


async def test_concurrently_requested_members_are_read_in_turn(tmp_path):
    path = tarred(tmp_path / "a.tar.xz", MEMBERS)
    source = Files(path, format=CSV, members="*.csv")
    got = {}
    with trio.fail_after(patience_s()):
        async with source.open() as connection, trio.open_nursery() as nursery:

            async def one(request):
                got[request.key] = (await connection.fetch(request, timeout_s=30)).body

            for request in await requests(source):
                nursery.start_soon(one, request)
    assert got == MEMBERS


def linked(tmp_path):
    """Return a folder with links that lead out of it, links within it, and one to a folder outside."""
    inbox, outside = tmp_path / "inbox", tmp_path / "outside"
    (inbox / "below").mkdir(parents=True)
    outside.mkdir()
    for path in (inbox / "a.csv", inbox / "below" / "b.csv", outside / "secret.csv"):
        path.write_text(f"name\n{path.stem}\n")
    (inbox / "out.csv").symlink_to(outside / "secret.csv")
    (inbox / "folder").symlink_to(outside)
    (inbox / "within.csv").symlink_to(inbox / "below" / "b.csv")
    return inbox


async def test_a_pattern_leaves_out_what_links_out_of_its_folder_lead_to(tmp_path):
    inbox = linked(tmp_path)
    with capture_logs() as lines:
        found = [Path(one.endpoint).name for one in await requests(Files(inbox / "**" / "*.csv", format=CSV))]
    assert sorted(found) == ["a.csv", "b.csv", "within.csv"]
    [line] = lines
    assert line["files"] == 2
    followed = await requests(Files(inbox / "**" / "*.csv", format=CSV, follow_links=True))
    assert len(followed) == 5
    # The folder itself, and a named file, may be behind links: the author of the load has chosen them.
    (tmp_path / "link").symlink_to(inbox)
    assert len(await requests(Files(tmp_path / "link" / "*.csv", format=CSV))) == 2
    named = Files(inbox / "out.csv", format=CSV)
    assert (await ask(named, (await requests(named))[0])).body == b"name\nsecret\n"


@pytest.mark.parametrize("members", [None, "*.csv"])
async def test_a_file_that_becomes_a_link_after_it_was_listed_is_not_read(tmp_path, members):
    inbox = linked(tmp_path)
    source = Files(inbox / "a.*", format=CSV, members=members)
    if members:
        tarred(tmp_path / "outside" / "a.tar", MEMBERS, "w")
    request = Request(endpoint=str(inbox / "a.csv"), key=next(iter(MEMBERS)) if members else None)
    (inbox / "a.csv").unlink()
    (inbox / "a.csv").symlink_to(tmp_path / "outside" / ("a.tar" if members else "secret.csv"))
    with pytest.raises(SourceError, match="is a link out of its folder"):
        await ask(source, request)


async def test_a_link_in_an_archive_is_no_file(tmp_path):
    path = tarred(tmp_path / "a.tar.xz", MEMBERS)
    assert "link.csv" not in [one.key for one in await requests(Files(path, format=CSV, members="*"))]
    with pytest.raises(SourceError, match=r"link\.csv is no longer in the archive"):
        await ask(Files(path, format=CSV, members="*"), files.Request(endpoint=str(path), key="link.csv"))


@pytest.mark.parametrize("name", ["a.tar.xz", "a.tar.gz", "a.tar", "a.zip"])
async def test_an_archive_that_was_cut_is_an_error_that_passes(tmp_path, name):
    path = tmp_path / name
    if name == "a.zip":
        zipped(path, MEMBERS)
    else:
        tarred(path, MEMBERS, {"xz": "w:xz", "gz": "w:gz", "tar": "w"}[name.rpartition(".")[2]])
    whole = path.read_bytes()
    # 512 × 6 is between two members of the plain one, which tarfile does not notice; its end has only zeros.
    lengths = {0, 5, 512 * 6} if name == "a.tar" else {0, 5, len(whole) // 2, len(whole) - 30}
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError, match="the archive cannot be read") as caught:
            await requests(Files(path, format=CSV, members="*.csv"))
        assert caught.value.is_retryable


async def test_an_archive_that_unpacks_without_end_is_refused_at_the_bound(tmp_path):
    path = tarred(tmp_path / "a.tar.xz", {"a.csv": b"0" * 3_000_000})
    assert path.stat().st_size < 10_000
    with pytest.raises(SourceError, match="unpacks to more than the limit of 1,000,000 bytes") as caught:
        await requests(Files(path, format=CSV, members="*", max_unpacked_bytes=1_000_000))
    assert not caught.value.is_retryable
    source = Files(path, format=CSV, members="*", max_body_bytes=1_000_000)
    with pytest.raises(SourceError, match=r"a\.csv unpacks to more than the limit of 1,000,000 bytes"):
        await ask(source)


async def test_an_archive_with_two_files_of_one_name_or_none_is_an_error(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for content in (b"1\n", b"2\n"):
            info = tarfile.TarInfo("a.csv")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with pytest.raises(SourceError, match="has two files with the same name"):
        await requests(Files(path, format=CSV, members="*"))
    with pytest.raises(SourceError, match=r"the archive has no file that matches \*\.json"):
        await requests(Files(path, format=CSV, members="*.json"))


async def test_compressed_files_are_read_by_their_format(tmp_path):
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(b"1\n2\nx,y\n"))
    pages = await walk(Files(f"{tmp_path}/*.xz", format=Compressed(CSV)))
    assert [record["n"] for record in records(pages)] == ["1", "2"]
    assert [one.key for one in broken(pages)] == ["line 3"]


async def test_files_are_read_off_the_main_thread(tmp_path):
    path, fed = tmp_path / "a.json", []
    os.mkfifo(path)

    def feed(by):
        fed.append(by)
        path.write_text("{}")

    # If the file were read on the main thread, only another thread could end that.
    watchdog = threading.Timer(20, feed, ["the watchdog"])
    watchdog.start()
    async with Files(path, format=Json()).open() as connection, trio.open_nursery() as nursery:
        nursery.start_soon(_read, connection, path)
        await trio.testing.wait_all_tasks_blocked()
        feed("this test")
    watchdog.cancel()
    assert fed == ["this test"]


async def _read(connection, path):
    # A pipe has no length.
    with pytest.raises(SourceError, match="was changed while it was read"):
        await connection.fetch(Request(endpoint=str(path)), timeout_s=60)
