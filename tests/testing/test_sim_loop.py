from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from forebay.testing.sim_loop import Deadlock, Forbidden, SimLoop, StepLimit, TimeLimit
from forebay.testing.sim_process import CURRENT, Process

T = TypeVar("T")


def process(name: str, seed: int = 0) -> Process:
    return Process(name, random.Random(f"{seed}/{name}"))


def run(main: Coroutine[Any, Any, T], seed: int = 0, **limits: Any) -> T:
    loop = SimLoop(process("world", seed), **limits)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def in_process(owner: Process) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(CURRENT.set, owner)
    return context


def test_an_hour_of_sleep_is_an_hour_of_virtual_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(main()) == 3600.0


def test_timers_fire_in_order_of_time_and_never_early() -> None:
    async def main() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []

        def note(delay: float) -> None:
            fired.append((delay, loop.time()))

        for delay in (3.0, 1.0, 2.0, 0.0):
            loop.call_later(delay, note, delay)
        await asyncio.sleep(10)
        return fired

    assert run(main()) == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_cancelled_timers_do_not_hold_time_back() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for delay in range(1, 5_000):
            loop.call_later(delay, lambda: None).cancel()
        kept = loop.create_future()
        loop.call_later(7000, kept.set_result, None)
        await kept
        return loop.time()

    assert run(main()) == 7000.0


def test_timeouts_events_queues_and_task_groups_work() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        ready = asyncio.Event()

        async def produce() -> None:
            await ready.wait()
            for number in range(5):
                await queue.put(number)

        async def consume() -> None:
            for expected in range(5):
                assert await queue.get() == expected
            said.append("all")

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
            await asyncio.sleep(1)
            ready.set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 2)
        said.append(f"at {asyncio.get_running_loop().time():g}")
        return said

    assert run(main()) == ["all", "at 8"]


def test_failure_in_a_task_group_cancels_its_siblings() -> None:
    async def main() -> bool:
        cancelled = False

        async def wait() -> None:
            nonlocal cancelled
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled = True
                raise

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError("broken")

        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(wait())
                group.create_task(fail())
        return cancelled

    assert run(main())


async def _order_of_tasks(count: int) -> str:
    order: list[str] = []

    async def say(name: str) -> None:
        order.append(name)

    await asyncio.gather(*(say(chr(ord("a") + number)) for number in range(count)))
    return "".join(order)


def test_order_of_tasks_depends_on_the_seed_alone() -> None:
    orders = [run(_order_of_tasks(6), seed) for seed in range(30)]
    assert orders == [run(_order_of_tasks(6), seed) for seed in range(30)]
    assert len(set(orders)) > 20
    assert {"".join(sorted(order)) for order in orders} == {"abcdef"}


def test_every_order_of_three_tasks_is_reached() -> None:
    assert len({run(_order_of_tasks(3), seed) for seed in range(200)}) == 6


def test_plain_callbacks_of_one_process_stay_in_order() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        for number in range(20):
            loop.call_soon(order.append, number)
        await asyncio.sleep(1)
        return order

    for seed in range(50):
        assert run(main(), seed) == list(range(20))


def test_adding_a_process_does_not_reorder_the_others() -> None:
    async def main(names: str) -> str:
        loop = asyncio.get_running_loop()
        order: list[str] = []

        async def say(name: str) -> None:
            for _ in range(3):
                order.append(name)
                await asyncio.sleep(0)

        tasks = [loop.create_task(say(name), context=in_process(process(name, seed))) for name in names]
        await asyncio.wait(tasks)
        return "".join(order)

    for seed in range(30):
        without, with_x = run(main("abcd"), seed), run(main("xabcd"), seed)
        assert with_x.replace("x", "") == without


def test_zero_sleep_lets_every_ready_task_run_once() -> None:
    async def main() -> int:
        ran = 0

        async def count() -> None:
            nonlocal ran
            ran += 1

        tasks = [asyncio.create_task(count()) for _ in range(10)]
        await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return ran

    for seed in range(20):
        assert run(main(), seed) == 10


def test_callbacks_of_a_dead_process_are_dropped() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        actor, said = process("actor"), []

        async def work() -> None:
            try:
                said.append("begin")
                await asyncio.sleep(1)
                said.append("never")
            finally:
                said.append("never either")

        task = loop.create_task(work(), context=in_process(actor))
        loop.call_later(1, said.append, "timer", context=in_process(actor))
        await asyncio.sleep(0.5)
        actor.alive = False
        await asyncio.sleep(5)
        assert not task.done()
        return list(said)

    assert run(main()) == ["begin"]


def test_deadlock_names_who_waits_and_where() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.get_running_loop().create_task(stuck(), name="patient zero")

    with pytest.raises(Deadlock, match=r"patient zero in .*stuck line \d+"):
        run(main())


def test_busy_loop_hits_the_step_limit() -> None:
    async def main() -> None:
        for _ in itertools.repeat(None):
            await asyncio.sleep(0)

    with pytest.raises(StepLimit, match=r"over 1,000 steps at 0\.000 s"):
        run(main(), steps_max=1000)


def test_endless_wait_hits_the_time_limit() -> None:
    async def main() -> None:
        for _ in itertools.repeat(None):
            await asyncio.sleep(10)

    with pytest.raises(TimeLimit, match="over 100 s"):
        run(main(), seconds_max=100)


def _refused(do: Callable[[asyncio.AbstractEventLoop], Coroutine[Any, Any, object]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(Forbidden, match="one thread on virtual time"):
            await do(loop)
        assert isinstance(loop, SimLoop)
        assert len(loop.violations) == 1

    run(main())


def test_threads_are_refused() -> None:
    _refused(lambda loop: asyncio.to_thread(time.sleep, 0))


def test_sockets_are_refused() -> None:
    with socket.socket() as sock:
        _refused(lambda loop: loop.sock_recv(sock, 1))
        _refused(lambda loop: asyncio.open_connection("127.0.0.1", 9))


def test_processes_are_refused() -> None:
    _refused(lambda loop: asyncio.create_subprocess_exec("true"))


def test_calls_from_another_thread_are_refused() -> None:
    async def main() -> list[BaseException]:
        loop = asyncio.get_running_loop()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(lambda: None)
            except Forbidden as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return errors

    [error] = run(main())
    assert "another thread" in str(error)


def test_left_over_tasks_end_silently_with_the_loop() -> None:
    began: list[str] = []

    async def stubborn() -> None:
        while len(began) < 5:
            try:
                began.append("again")
                await asyncio.sleep(1000)
            except BaseException:
                continue

    async def main() -> None:
        asyncio.create_task(stubborn())  # noqa: RUF006 - left over on purpose
        await asyncio.sleep(1)

    run(main())
    assert began


def test_tasks_are_named_for_their_process() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        context = in_process(process("writer"))
        tasks = [loop.create_task(asyncio.sleep(0), context=context) for _ in range(2)]
        await asyncio.gather(*tasks)
        return [task.get_name() for task in tasks]

    assert run(main()) == ["writer/1", "writer/2"]
