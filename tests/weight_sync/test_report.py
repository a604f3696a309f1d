"""The receiver's report on its way back: whole, once, and nothing is left behind."""

import os

import pytest

from verl_precision.weight_sync.report import ReportBox, SyncReport


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("written", "taken"), [
    ([SyncReport(35, 2, 0.5)], SyncReport(35, 2, 0.5)),
    ([SyncReport(35, 0, 0.5), SyncReport(0, 12, 0.25)], SyncReport(35, 12, 0.75)),  # LoRA: base, then adapter
    ([None], None),  # another rollout engine reads no manifest, and a failed sync raises by itself
    ([None, SyncReport(0, 12, 0.25)], SyncReport(0, 12, 0.25)),
])  # fmt: skip
def test_reports_of_a_sync_are_added_and_come_back_once(own_folder, written, taken):
    box = ReportBox()
    for report in written:
        address = box.new_address()
        if report is not None:
            report.write(address)
    assert (box.take(), box.take()) == (taken, None)
    assert list(own_folder.iterdir()) == []


def test_what_ended_processes_left_is_removed_and_what_is_awaited_stays(own_folder, run_python):
    ended = run_python("import os; print(os.getpid())")
    awaited, foreign = f"vp-weight-sync-{os.getpid()}-0b.json", "vp-weight-sync-notes.json"
    for name in (f"vp-weight-sync-{ended.stdout.strip()}-0a.json", awaited, foreign):
        (own_folder / name).write_text("{}")
    ReportBox()
    assert sorted(os.listdir(own_folder)) == sorted([awaited, foreign])


def test_addresses_have_one_length_and_another_host_writes_nothing(own_folder, monkeypatch):
    box, addresses = ReportBox(), []
    for process in (7, 4_194_304):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        addresses.append(box.new_address())
    assert len({len(address) for address in addresses}) == 1
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert SyncReport(1).write(addresses[0]) is False and list(own_folder.iterdir()) == []
