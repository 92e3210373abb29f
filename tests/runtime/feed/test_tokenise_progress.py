"""What is said while tokenising goes on."""

from xtrain.runtime.feed.token_store import DataProgress, ReadingPace, every, in_words


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def moment(done: int, **more) -> DataProgress:
    return DataProgress(
        **{"stage": "tokens", "done": done, "total": 4 << 20, "documents": 7, "tokens": done // 2} | more
    )


def test_a_pace_counts_what_it_has_seen():
    clock = Clock()
    pace = ReadingPace(clock=clock)
    pace.look(moment(1 << 20, resumed=1 << 20))
    assert (pace.bytes_per_second, pace.seconds_left) == (None, None)
    clock.now = 2.0
    pace.look(now := moment(2 << 20, bad_records=3))
    assert (pace.bytes_per_second, pace.tokens_per_second, pace.seconds_left) == (1 << 19, 1 << 18, 4.0)
    assert in_words(now, pace) == (
        "tokenizing: 50% of 4.00 MiB · 4.00 s left · 524 kB/s · 262,144 tokens/s · 7 documents of 1,048,576 tokens"
        " · 3 bad records"
    )
    pace.look(now := DataProgress(stage="files", done=5))
    assert in_words(now, pace) == "reading files: 5 B"
    clock.now = 3.0
    pace.look(now := DataProgress(stage="waiting", builder="process 7 on node", done=9, total=None))
    assert in_words(now, pace) == "waiting for process 7 on node, which tokenizes: 9 B"


def test_lines_come_now_and_then():
    clock, lines = Clock(), []
    report = every(10.0, lambda line, now: lines.append((clock.now, now.done, line)), clock)
    for second in range(35):
        clock.now = second
        report(moment(second << 10))
    assert [(at, done >> 10) for at, done, _ in lines] == [(10.0, 10), (20.0, 20), (30.0, 30)]
    assert lines[0][2].startswith("tokenizing: 0% of 4.00 MiB · ")
