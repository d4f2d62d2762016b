"""The harness of the benchmarks, with fake variants: nothing here looks at a clock."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from xml.etree import ElementTree

import msgspec
import pytest
from benchmarks import command
from benchmarks.figures import embedded, local_cas
from benchmarks.figures import suite as real_suite
from benchmarks.harness import (
    Bench,
    CannotMeasure,
    Figure,
    Measure,
    Sample,
    Suite,
    Variant,
    Variants,
    at_least,
    at_most,
    rounds,
)
from benchmarks.harness.bars import span_of, terminal_bar
from benchmarks.harness.chart import draw
from benchmarks.harness.crew import Crew, CrewFailed, Job
from benchmarks.harness.figure import joined
from benchmarks.harness.machine import Machine, cpu_slug, file_system_of, this_machine
from benchmarks.harness.page import BEGIN, END, markdown, renew
from benchmarks.harness.results import BenchmarkResult, FigureResult, Run, load, save, summarize
from benchmarks.harness.rounds import FULL, QUICK, Plan, measure, order
from benchmarks.harness.timing import timed
from benchmarks.harness.wording import number
from benchmarks.peers import environment
from benchmarks.peers.process import PeerFailed, PeerProcess

MACHINE = Machine("Linux", "6.1.0", "x86_64", 2, "Some(R) CPU @ 2.80GHz", 8.0, "ext4")
RUN = Run("2026-01-02T03:04:05Z", "abc123", MACHINE, {"python": "3.11.2"})


@pytest.fixture(autouse=True)
def _no_sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeping the heap of a whole test run before every turn would be most of the time here."""
    monkeypatch.setattr(rounds, "collect", lambda: 0)


def fixed(*rates: float, unit: str = "/s") -> Variant:
    """A variant whose turns give these rates, one after the other; the warm-up gives nonsense."""
    turns = iter([12345.0, *rates])
    return Variant(lambda seconds: Sample(next(turns)), unit)


def result_of(figure: Figure, **variants: Variant) -> BenchmarkResult:
    suite = Suite()
    suite.benchmark("fake", "A claim.", figure)(lambda bench: iter([variants]))
    [benchmark] = suite
    plan = Plan(rounds=3, seconds=0.0)
    return summarize(benchmark, RUN, plan, variants, measure(variants, plan), load=(0.5, 1.5))


# -- figures


def test_the_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    result = result_of(Figure("f", of="ours", against="raw"), ours=fixed(1, 20, 300), raw=fixed(2, 10, 100))
    [figure] = result.figures
    # The ratio of the medians would be 20 / 10; so would be a ratio that mixes rounds.
    assert figure.samples == [0.5, 2.0, 3.0]
    assert (figure.lowest, figure.median, figure.highest) == (0.5, 2.0, 3.0)


def test_time_is_the_inverse_of_rate() -> None:
    figure = Figure("f", of="ours", against="raw", measure=Measure.TIME, target=at_most(3))
    [made] = result_of(figure, ours=fixed(25, 25, 25), raw=fixed(100, 100, 100)).figures
    assert made.median == 4.0
    assert made.met is False


def test_processor_time_is_compared_per_unit() -> None:
    figure = Figure("x", of="a", against="b", measure=Measure.CPU, target=at_most(0.5))
    assert figure.value({"a": Sample(1.0, cpu_us=2.0), "b": Sample(9.0, cpu_us=8.0)}) == 0.25
    with pytest.raises(ValueError, match="nobody looked"):
        figure.value({"a": Sample(1.0, cpu_us=2.0), "b": Sample(9.0)})


def test_least_share_compares_the_unluckiest_with_the_mean() -> None:
    figure = Figure("f", of="crew", measure=Measure.LEAST_SHARE)
    assert figure.value({"crew": Sample(12.0, (1.0, 5.0, 6.0))}) == 0.25
    assert figure.value({"crew": Sample(0.0, (0.0, 0.0))}) == 0.0


def test_a_plain_rate_is_held_against_its_target() -> None:
    figure = Figure("f", of="seeds", measure=Measure.PLAIN, target=at_least(50))
    [made] = result_of(figure, seeds=fixed(40, 60, 70)).figures
    assert (made.median, made.met) == (60.0, True)


def test_a_ratio_to_nothing_is_a_miss_and_no_crash() -> None:
    figure = Figure("f", of="ours", against="raw", target=at_least(0.5))
    [made] = result_of(figure, ours=fixed(1, 1, 1), raw=fixed(0, 0, 0)).figures
    assert (made.median, made.met) == (0.0, False)


@pytest.mark.parametrize(
    ("target", "value", "met", "margin"),
    [
        (at_least(0.25), 0.25, True, 1.0),
        (at_least(0.25), 0.125, False, 0.5),
        (at_most(3), 3.0, True, 1.0),
        (at_most(3), 6.0, False, 0.5),
        (at_most(3), 1.5, True, 2.0),
    ],
)
def test_targets_know_both_directions(target: object, value: float, met: bool, margin: float) -> None:
    assert isinstance(target, type(at_least(1)))
    assert target.is_met(value) is met
    assert target.margin(value) == margin


# -- turns


def test_rounds_go_there_and_back() -> None:
    calls: list[str] = []

    def noted(name: str) -> Variant:
        def run(seconds: float) -> Sample:
            calls.append(name)
            return Sample(1.0)

        return Variant(run)

    ticks: list[None] = []
    measure({name: noted(name) for name in "abc"}, Plan(rounds=3, seconds=1.0), lambda: ticks.append(None))
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"
    assert len(ticks) == 9


def test_every_variant_has_both_neighbours() -> None:
    names = list("abcd")
    followers = {pair for index in range(2) for pair in pairwise(order(names, index))}
    assert {("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")} <= followers


def test_a_variant_may_stretch_its_turns() -> None:
    seen: list[float] = []

    def run(seconds: float) -> Sample:
        seen.append(seconds)
        return Sample(1.0)

    measure({"long": Variant(run, stretch=4.0)}, Plan(rounds=1, seconds=0.5))
    assert seen[-1] == 2.0


def test_turns_that_are_whole_jobs_are_fewer_and_in_one_piece() -> None:
    plan = FULL.of_jobs()
    assert plan.slices == 1 and plan.rounds < FULL.rounds and plan.rounds % 2 == 1
    assert QUICK.of_jobs() == QUICK


def test_slices_of_a_round_alternate_and_their_sums_make_the_ratio() -> None:
    turns: list[str] = []
    rates = {"ours": [9.0, 1.0, 5.0], "raw": [18.0, 2.0, 10.0]}

    def noted(name: str) -> Variant:
        def run(seconds: float) -> Sample:
            if seconds == 1.0:
                turns.append(name)
                return Sample(rates[name].pop(0))
            return Sample(12345.0)

        return Variant(run)

    [samples] = measure({name: noted(name) for name in rates}, Plan(rounds=1, seconds=3.0, slices=3))
    assert turns == ["ours", "raw", "raw", "ours", "ours", "raw"]
    assert Figure("f", of="ours", against="raw").value(samples) == 0.5
    assert samples["raw"].rate == 10.0


def test_joined_slices_weigh_processor_time_by_the_work_done() -> None:
    slices = [Sample(30.0, (10.0, 20.0), 100.0), Sample(10.0, (6.0, 4.0), 500.0)]
    assert joined(slices) == Sample(20.0, (8.0, 12.0), 200.0)
    assert joined([Sample(30.0, (), 100.0), Sample(10.0)]).cpu_us is None
    assert joined([Sample(0.0, (), None)]) == Sample(0.0)


def test_timed_repeats_its_step_and_counts_units() -> None:
    done: list[int] = []

    def step() -> float:
        done.append(1)
        return 100.0

    sample = timed(step, 0.0001)
    assert done
    assert sample.rate > 0
    assert sample.cpu_us is not None


# -- crews


@dataclass
class FakeJob(Job):
    """Counts to a fixed number; refuses a negative time."""

    units: int

    def __enter__(self) -> object:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def run(self, seconds: float) -> int:
        if seconds < 0:
            raise ValueError("less than no time")
        return self.units


def test_the_first_few_of_a_crew_work_and_the_failure_of_one_is_told() -> None:
    with Crew(FakeJob(7), sizes=(1, 2)) as crew:
        assert len(crew.run(1, 0.0).shares) == 1
        both = crew.run(2, 0.0)
        assert len(both.shares) == 2
        assert both.rate == pytest.approx(sum(both.shares))
        assert both.cpu_us is not None
        with pytest.raises(CrewFailed, match="less than no time"):
            crew.run(1, -1.0)
        members = crew._members
    assert not any(member.is_alive() for member in members)


# -- results


def test_results_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    result = result_of(Figure("f", of="ours", against="raw"), ours=fixed(1, 2, 3), raw=fixed(4, 5, 6))
    save(tmp_path, result)
    assert load(tmp_path) == [result]


def test_the_json_keeps_every_sample_and_what_it_was_measured_on(tmp_path: Path) -> None:
    figure = Figure("f", of="ours", against="raw", target=at_least(0.25))
    path = save(tmp_path, result_of(figure, ours=fixed(1, 2, 3), raw=fixed(4, 5, 6)))
    document = json.loads(path.read_text())
    assert path.name == "fake.json"
    assert document["schema"] == 1
    assert document["run"]["commit"] == "abc123"
    assert document["run"]["machine"]["file_system"] == "ext4"
    assert document["variants"]["ours"]["samples"] == [1.0, 2.0, 3.0]
    assert document["figures"][0]["target"] == 0.25
    assert document["figures"][0]["met"] is True
    assert document["rounds"] == 3


def test_files_of_another_schema_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"schema": 0, "other": true}')
    assert load(tmp_path) == []


# -- machine


def test_machine_names_are_made_of_facts_about_the_processor() -> None:
    assert MACHINE.slug == "linux-x86_64-2cpu-some-2-80ghz"
    assert cpu_slug("AMD Ryzen 9 5950X 16-Core Processor") == "amd-ryzen-9-5950x"
    assert cpu_slug("") == "unknown"


def test_this_machine_tells_its_file_system(tmp_path: Path) -> None:
    machine = this_machine(tmp_path)
    assert machine.cpus >= 1
    assert machine.file_system == file_system_of(tmp_path)
    assert str(tmp_path) not in msgspec.json.encode(machine).decode()


# -- drawing


def some_results() -> list[BenchmarkResult]:
    good = Figure("better & <faster>", of="ours", against="raw", target=at_least(0.25))
    bad = Figure("worse", of="ours", against="raw", target=at_least(100))
    free = Figure("no target", of="ours", against="raw")
    return [result_of(figure, ours=fixed(1, 2, 3), raw=fixed(1, 1, 1)) for figure in (good, bad, free)]


def test_the_chart_is_well_formed_and_self_contained() -> None:
    text = draw(some_results())
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "better & <faster>" in names
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the name of the format itself
    assert "<script" not in text


def test_a_miss_points_to_the_other_side_of_the_line() -> None:
    good, bad, _ = (result.figures[0] for result in some_results())
    assert span_of(good)[1] > 0 > span_of(bad)[1]
    assert terminal_bar(good).index("│") < terminal_bar(good).index("━")
    assert terminal_bar(bad).index("│") > terminal_bar(bad).index("━")


def test_bars_stay_on_the_axis_whatever_the_figure() -> None:
    chance = random.Random(1)
    for _ in range(200):
        low, middle, high = sorted(10 ** chance.uniform(-9, 9) for _ in range(3))
        target = chance.choice([None, 0.25, 1000.0])
        figure = FigureResult(
            "f", "a", "b", chance.choice(list(Measure)), middle, low, high, [], target, chance.random() < 0.5
        )
        span = span_of(figure)
        assert -1 <= span[0] <= span[1] <= span[2] <= 1
        assert len(terminal_bar(figure)) == 13


def test_the_page_is_renewed_between_its_markers_only() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    renewed = renew(page, [some_results()])
    assert renewed.startswith("before\n")
    assert renewed.endswith("\nafter\n")
    assert "old" not in renewed
    assert "**missed**" in renewed
    assert renew(renewed, [some_results()]) == renewed
    assert renew(renewed, [some_results(), [], some_results()]).count("### ") == 2
    assert "Nothing was measured" in renew(page, [])


def test_the_page_names_the_first_and_the_last_commit_it_is_made_of() -> None:
    first, second, third = some_results()
    earlier = msgspec.structs.replace(first.run, commit="aaa", date="2026-01-01T00:00:00Z")
    later = msgspec.structs.replace(first.run, commit="bbb", date="2026-01-02T00:00:00Z")
    mixed = [
        msgspec.structs.replace(result, run=run)
        for result, run in ((first, later), (second, earlier), (third, later))
    ]
    assert "commits `aaa` of 2026-01-01T00:00:00Z to `bbb` of 2026-01-02T00:00:00Z" in markdown(mixed)


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="measured: begin"):
        renew("no markers", [])


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.0, "1,234,567"), (99.94, "99.9"), (1.234, "1.23"), (0.25, "0.25"), (0.01234, "0.012")],
)
def test_numbers_have_three_digits_and_no_powers_of_ten(value: float, text: str) -> None:
    assert number(value) == text


# -- the command


def fake_suite() -> Suite:
    suite = Suite()

    @suite.benchmark("good", "It works.", Figure("ratio", of="ours", against="raw", target=at_least(100)))
    def good(bench: Bench) -> Iterator[Variants]:
        assert bench.directory.is_dir()
        yield {"ours": Variant(lambda seconds: Sample(2.0)), "raw": Variant(lambda seconds: Sample(1.0))}

    @suite.benchmark("absent", "It needs a server.", Figure("ratio", of="ours", against="raw"))
    def absent(bench: Bench) -> Iterator[Variants]:
        raise CannotMeasure("there is no server here")
        yield {}

    @suite.benchmark("broken", "It breaks.", Figure("ratio", of="ours", against="raw"))
    def broken(bench: Bench) -> Iterator[Variants]:
        raise RuntimeError("out of luck")
        yield {}

    return suite


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    def call(*arguments: str) -> int:
        places = ["--directory", str(tmp_path / "disk"), "--results", str(tmp_path / "results")]
        return command.main([*arguments, *places], fake_suite())

    return call


def test_a_missed_target_is_shown_and_is_no_error(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("good") == 0
    shown = capsys.readouterr().out
    assert "missed  good: ratio" in shown
    assert "0 of 1 targets met" in shown
    [folder] = (tmp_path / "results").iterdir()
    assert {path.name for path in folder.iterdir()} == {"good.json", "chart.svg"}
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_quick_run_never_replaces_a_full_one(run: Callable[..., int], tmp_path: Path) -> None:
    run("good")
    [folder] = (tmp_path / "results").iterdir()
    before = (folder / "good.json").read_bytes()
    run("good", "--quick")
    assert (folder / "good.json").read_bytes() == before
    assert json.loads((folder / "quick" / "good.json").read_text())["run"]["quick"] is True


def test_skipped_and_broken_benchmarks_do_not_stop_the_rest(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--quick") == 1
    shown = capsys.readouterr().out
    assert "skipped absent: there is no server here" in shown
    assert "RuntimeError: out of luck" in shown
    assert "It works." in shown


def test_json_output_is_one_document(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("good", "absent", "--quick", "--output", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [result["benchmark"] for result in document["results"]] == ["good"]
    assert document["skipped"] == {"absent": "there is no server here"}


def test_list_measures_nothing(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--list") == 0
    shown = capsys.readouterr().out
    assert "good  It works." in shown
    assert ">= 100" in shown
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_is_wrong_usage(run: Callable[..., int]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("nobody")
    assert ended.value.code == 2


# -- peers

PEER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["threads"] > 9:
        sys.exit("too many threads")
    print(json.dumps({"rate": asked["threads"] * 100}), flush=True)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerProcess]:
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    with PeerProcess(Path(sys.executable), program) as process:
        yield process


def test_a_peer_answers_turn_after_turn(peer: PeerProcess) -> None:
    assert peer.variant("puts/s", threads=1).run(0.5) == Sample(100.0)
    assert peer.variant("puts/s", threads=4).run(0.5) == Sample(400.0)


def test_a_peer_that_dies_leaves_its_last_words(peer: PeerProcess) -> None:
    with pytest.raises(PeerFailed, match="too many threads"):
        peer.run(0.5, threads=10)


def test_an_environment_is_made_once_and_again_after_other_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def note(command: list[str]) -> None:
        commands.append(command)
        (tmp_path / "peers" / "some-client").mkdir(parents=True, exist_ok=True)

    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "_run", note)
    for pins in (["client==1"], ["client==1"], ["client==2"]):
        python = environment.peer_python("some-client", pins, lambda message: None)
        assert python == tmp_path / "peers" / "some-client" / "bin" / "python"
    assert [command[-1] for command in commands if "pip" in command] == ["client==1", "client==2"]


def test_an_environment_that_cannot_be_made_skips_with_the_last_word() -> None:
    program = "import sys; sys.exit('first line\\nno such package')"
    with pytest.raises(CannotMeasure, match="no such package"):
        environment._run([sys.executable, "-c", program])


# -- the real suite


@pytest.mark.parametrize(
    "name",
    ["embedded-write", "simulation", "local-put", "local-range", "batcher", "ids", "checksum"],
)
def test_benchmarks_without_servers_measure_what_their_figures_need(name: str, tmp_path: Path) -> None:
    [benchmark] = real_suite.select([name])
    plan = Plan(rounds=1, seconds=0.001)
    with benchmark.variants(Bench(tmp_path)) as variants:
        [samples] = measure(variants, plan)
    assert all(sample.rate > 0 for sample in samples.values())
    used = {variant for figure in benchmark.figures for variant in figure.variants()}
    assert used == set(samples)
    assert all(figure.value(samples) > 0 for figure in benchmark.figures)


def test_the_counting_jobs_count_what_really_happened(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/coordinator.db"
    asyncio.run(local_cas._begin(tmp_path / "store"))
    asyncio.run(embedded._begin(url))
    with local_cas.CountingJob(tmp_path / "store") as files, embedded.EmbeddedJob(url) as keys:
        done = files.run(0.01), keys.run(0.01)
        assert files.runner and files.store and keys.runner and keys.coordinator
        stored = files.runner.run(files.store.get(local_cas.KEY))
        record = keys.runner.run(keys.coordinator.get(embedded.KEY))
    assert record is not None
    assert (int(stored.data), int(record.value)) == done
    assert min(done) > 0


def test_the_issue_s_targets_are_in_the_suite() -> None:
    held = {
        (benchmark.name, figure.name): str(figure.target)
        for benchmark in real_suite
        for figure in benchmark.figures
        if figure.target is not None
    }
    assert held[("local-cas", "16 processes")] == ">= 0.25"
    assert held[("local-cas", "least lucky of 16")] == ">= 0.25"
    for processes in ("1 process", "4 processes", "16 processes"):
        assert held[("embedded-cas", processes)] == ">= 0.5"
    assert held[("embedded-write", "time of 100 puts")] == "<= 3"
    assert held[("oxia", "100 puts in one write")] == ">= 10"
    assert held[("oxia", "64 puts in flight")] == ">= 3"
    assert held[("simulation", "seeds per second")] == ">= 50"
    for size in ("132", "1k"):
        for way in ("", "availableNow: "):
            assert held[(f"spark-read-{size}", f"{way}CPU of the connector and its broker")] == "<= 0.5"
            assert held[(f"spark-read-{size}", f"{way}rows/s of the connector")] == ">= 2"
        assert held[(f"spark-read-{size}", "CPU of prepared batches")] == "<= 1.3"
        assert held[(f"spark-read-{size}", "CPU of spark.read.parquet")] == "<= 2.2"
        assert held[(f"spark-read-{size}", "two cores against one")] == ">= 1.7"
        for table in ("Delta", "Parquet"):
            assert held[(f"spark-export-{size}", f"{table}: CPU of source to df.write.parquet")] == "<= 0.5"
        assert held[(f"spark-export-{size}", "two cores against one")] == ">= 1.7"
    assert held[("spark-sink", "CPU of discarding")] == "<= 1.25"
    assert held[("spark-sink", "rows/s of df.write.format(kafka)")] == ">= 1.5"
    assert held[("spark-tail", "overhead of a trigger, ms")] == "<= 50"
    assert held[("spark-tail", "round trips of latestOffset, 1,000 partitions")] == "<= 1"


def test_real_benchmarks_have_distinct_figures_and_a_claim() -> None:
    assert [benchmark.name for benchmark in real_suite]
    for benchmark in real_suite:
        names = [figure.name for figure in benchmark.figures]
        assert len(set(names)) == len(names) > 0
        assert benchmark.claim.endswith(".")


def test_two_benchmarks_of_one_name_are_refused() -> None:
    suite = fake_suite()
    with pytest.raises(ValueError, match="two benchmarks named 'good'"):
        suite.benchmark("good", "Again.")
