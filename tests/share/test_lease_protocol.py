"""The lease protocol against an adversary, who decides which worker acts next, what it sees, and who dies."""

import threading
from collections import defaultdict
from queue import SimpleQueue

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from thorough import some_draws

from batchgen.share.lease import Table
from batchgen.share.worker import Worker, range_name

ROWS, LEASE_S = 12, 10.0
RANGES = [range(5), range(5, 9), range(9, 12)]


class Killed(BaseException):
    """A process is gone in the middle of an operation."""


class Disk:
    """A file system in memory; the content of parts is (row, writer).

    Attributes:
        seen: what each worker sees of folders, which may be old.
    """

    def __init__(self):
        self.files = {}
        self.parts = defaultdict(list)  # (name, generation): [rows of a part]


class FilesOf:
    """What one worker sees of a disk, an operation each time it is its turn."""

    def __init__(self, disk, process):
        self.disk, self.process = disk, process
        self.seen = {}  # what listing and reading show: as of the last time that its view was renewed
        self.lose_answer = False

    def renew(self):
        self.seen = dict(self.disk.files)

    def create(self, name, content):
        self.process.turn()
        if name in self.disk.files:
            return False
        self.disk.files[name] = self.seen[name] = content
        lost, self.lose_answer = self.lose_answer, False
        return not lost

    def replace(self, name, content):
        self.process.turn()
        self.disk.files[name] = self.seen[name] = content

    def read(self, name):
        self.process.turn()
        return self.seen.get(name)

    def names(self, folder):
        self.process.turn()
        return sorted(n.partition("/")[2] for n in self.seen if n.startswith(folder + "/"))

    def remove(self, name):
        self.process.turn()
        self.disk.files.pop(name, None)


class PartsOf:
    def __init__(self, disk, process):
        self.disk, self.process = disk, process

    def count(self, name, generation):
        self.process.turn()
        return len(self.disk.parts[name, generation])

    def rows(self, name, generation, count):
        self.process.turn()
        for rows in self.disk.parts[name, generation][:count]:
            yield list(rows), [row % 4 == 3 for row in rows]

    def write(self, name, generation, number, results):
        self.process.turn()
        parts = self.disk.parts[name, generation]
        assert number == len(parts), "a part was written twice"
        parts.append(sorted(results))
        return sum(row % 4 == 3 for row in results)


class Process:
    """A worker's loop in a thread that runs only while the adversary lets it: up to its next file operation."""

    def __init__(self, disk, number, pace):
        self.clock_s = 1000.0 * number  # clocks have nothing in common
        self.files = FilesOf(disk, self)
        self.worker = Worker(f"w{number}", self.files, LEASE_S, now=lambda: self.clock_s)
        self.worker.work_on(RANGES, PartsOf(disk, self))
        self.pace, self.over, self.killed, self.failure = pace, False, False, None
        self._go, self._stopped = SimpleQueue(), SimpleQueue()
        threading.Thread(target=self._main, daemon=True).start()

    def step(self, times=1):
        for _ in range(times):
            if self.over:
                return
            self._go.put(None)
            self._stopped.get()
            if self.failure is not None:
                raise self.failure

    def kill(self):
        self.killed = True
        self.step(2)  # it may not have begun

    def turn(self):
        """Called by the worker before each file operation: waits until it may."""
        self._stopped.put(None)
        self._go.get()
        if self.killed:
            raise Killed

    def _main(self):
        self._go.get()
        try:
            self._work()
        except Killed:
            pass
        except BaseException as error:
            self.failure = error
        self.over = True
        self._stopped.put(None)

    def _work(self):
        worker = self.worker
        while True:
            worker.tick()
            rows = worker.claim_range(ahead=6)
            if rows is None and worker.all_done:
                return
            while rows:
                some, rows = rows[: self.pace], rows[self.pace :]
                worker.tick()
                for _ in some:
                    worker.row_finished()
                worker.save(dict.fromkeys(some))


class Sharing(RuleBasedStateMachine):
    @initialize(paces=st.lists(st.integers(1, 4), min_size=2, max_size=3))
    def start(self, paces):
        self.disk = Disk()
        self.processes = []
        self.done_before = {}
        for pace in paces:
            self.join(pace)

    @precondition(lambda self: len(self.processes) < 6)
    @rule(pace=st.integers(1, 4))
    def join(self, pace):
        self.processes.append(Process(self.disk, len(self.processes), pace))

    def one(self, data):
        return data.draw(st.sampled_from(self.processes))

    @rule(data=st.data(), times=st.integers(1, 40), fresh=st.booleans())
    def run(self, data, times, fresh):
        process = self.one(data)
        for _ in range(times):
            if fresh:
                process.files.renew()
            process.step()

    @rule(data=st.data())
    def renew(self, data):
        self.one(data).files.renew()

    @rule(data=st.data(), seconds=st.sampled_from([1.0, LEASE_S / 2, 3 * LEASE_S]))
    def time_passes(self, data, seconds):
        """For one machine more than for the others: it was suspended, or its clock is fast."""
        self.one(data).clock_s += seconds

    @rule(data=st.data())
    def kill(self, data):
        self.one(data).kill()

    @rule(data=st.data())
    def answer_is_lost(self, data):
        self.one(data).files.lose_answer = True

    @invariant()
    def what_is_done_stays_and_is_whole(self):
        if not hasattr(self, "disk"):
            return
        done = {name: content for name, content in self.disk.files.items() if name.startswith("done/")}
        assert self.done_before.items() <= done.items()
        self.done_before = done
        for index, rows in enumerate(RANGES):
            if f"done/{range_name(index)}" in done:
                assert self.result_of(index) == set(rows)

    def teardown(self):
        """When the adversary lets go, those left finish, in turns, and a worker that comes late finds all done."""
        if not hasattr(self, "disk"):
            return
        try:
            late = Process(self.disk, len(self.processes), 2)
            for _ in range(400):
                for process in (*self.processes, late):
                    process.files.renew()
                    process.step(5)
                    process.clock_s += LEASE_S / 12
                if late.over:
                    break
            assert late.over and late.worker.all_done
            assert sum(late.worker.counts()) == ROWS
            assert late.worker.counts()[1] == sum(row % 4 == 3 for row in range(ROWS))
            self.what_is_done_stays_and_is_whole()
        finally:
            for process in self.processes:
                process.kill()

    def result_of(self, index):
        """The rows in the parts that count."""
        table = Table(SeeingAll(self.disk), LEASE_S, lambda: 0.0)
        table.refresh()
        done = table.done[range_name(index)]
        found = [
            row for g, n in done.parts.items() for part in self.disk.parts[range_name(index), g][:n] for row in part
        ]
        assert all(len(self.disk.parts[range_name(index), g]) >= n for g, n in done.parts.items())
        assert len(found) == len(set(found)), "a row counts twice"
        assert (done.ok + done.failed, done.failed) == (len(found), sum(row % 4 == 3 for row in found))
        return set(found)


class SeeingAll:
    """The disk as it is."""

    def __init__(self, disk):
        self.disk = disk

    def read(self, name):
        return self.disk.files.get(name)

    def names(self, folder):
        return sorted(n.partition("/")[2] for n in self.disk.files if n.startswith(folder + "/"))


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=some_draws(90), stateful_step_count=40, deadline=None)
