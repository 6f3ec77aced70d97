"""Machine files: what is read, which mistakes are named, and rates between two points."""

from __future__ import annotations

import pytest

from zeroshard.config.machine_file import (
    PRESETS,
    Values,
    check_links,
    load_machine,
    parse_machine,
    presets,
    rate_at,
)
from zeroshard.errors import ConfigError, UsageError
from zeroshard.planner import make_plan
from zeroshard.planner.measure import as_toml

HEAD = 'name = "a"\nexecution = "serial"\n'
NODE = 'devices_per_node = {value = 8, source = "vendor"}\n'
ALPHA = 'alpha_s = {value = 1e-5, source = "assumed"}\n'
RATE = 'all_gather = {value = [[1e6, 1e10]], source = "assumed"}\n'


def test_a_file_without_mistakes_is_read():
    text = (
        HEAD
        + 'devices_per_node = {value = 2, source = "vendor"}\n[device]\noperation_s = '
        + '{value = 1e-6, source = "measured"}\n[matmul]\nfloat32 = {value = [[1e6, 1e9], [1e9, 2e9]], '
        + 'source = "assumed"}\n[special]\n_softmax = {value = 3, source = "measured"}\n'
    )
    values = Values(parse_machine(text, "a.toml"))
    assert values.number("device.operation_s") == 1e-6
    assert list(values.points("matmul.float32")) == [(1e6, 1e9), (1e9, 2e9)]
    assert values.has("special._softmax") and not values.has("special.exp")
    assert values.used == {"device.operation_s": "measured", "matmul.float32": "assumed"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "a.toml is not TOML"),
        ('execution = "serial"', "name is missing"),
        ('name = "a"', "execution is missing"),
        ('name = "a"\nexecution = "fast"', "execution is \"fast\": Input should be 'streams'"),
        (
            HEAD + "[device]\nmemory_byte = 3",
            "memory_byte is unknown. Did you mean 'memory_bytes'?",
        ),
        (HEAD + "[gpu]\nmemory_bytes = 3", "gpu is unknown. Known: "),
        (HEAD + "[device]\noperation_s = 3", "device.operation_s is 3: "),
        (HEAD + "[device]\noperation_s = {value = 3}", "device.operation_s.source is missing"),
        (
            HEAD + '[device]\noperation_s = {value = -1, source = "vendor"}',
            "device.operation_s.value is -1: must be a positive number",
        ),
        (HEAD + '[host]\ncores = {value = nan, source = "vendor"}', "host.cores.value is NaN"),
        (HEAD + '[host]\ncores = {value = inf, source = "vendor"}', "host.cores.value is Infinity"),
        (HEAD + '[host]\ncores = {value = true, source = "vendor"}', "host.cores.value is true"),
        (HEAD + '[host]\ncores = {value = "8", source = "vendor"}', 'host.cores.value is "8"'),
        (
            HEAD + '[host]\ncores = {value = 8, source = "guessed"}',
            "host.cores.source is \"guessed\": Input should be 'measured', 'vendor' or 'assumed'",
        ),
        (
            HEAD + '[matmul]\nint4 = {value = [[1, 1]], source = "vendor"}',
            "matmul.int4 is ",
        ),
        (
            HEAD + '[matmul]\nfloat32 = {value = [], source = "vendor"}',
            "matmul.float32.value is []: must be pairs [size, rate], one or more, by increasing size",
        ),
        (
            HEAD + '[matmul]\nfloat32 = {value = [[2, 1], [1, 1]], source = "vendor"}',
            "must be pairs [size, rate], one or more, by increasing size",
        ),
        (
            HEAD + '[inside_node]\nall_gather = {value = [[4096]], source = "vendor"}',
            "inside_node.all_gather.value.0.1 is ",
        ),
    ],
)
def test_a_mistake_is_named_with_its_key_and_value(text, said):
    with pytest.raises(ConfigError) as found:
        parse_machine(text, "a.toml")
    assert said in str(found.value)


def test_all_mistakes_are_in_one_message():
    with pytest.raises(ConfigError) as found:
        parse_machine('speed = 1\n[device]\noperation_s = {value = 0, source = "x"}', "a.toml")
    lines = str(found.value).splitlines()
    assert lines[0] == "a.toml describes no machine:"
    assert len(lines) == 7  # name, execution, speed, value, source, and how a number is written
    assert 'A number is {value = 1.5e12, source = "vendor"}' in lines[-1]


def test_a_number_that_is_missing_is_named():
    values = Values(parse_machine(HEAD, "a.toml"))
    for key in ("device.operation_s", "matmul.bfloat16", "between_nodes.alpha_s"):
        with pytest.raises(UsageError) as found:
            values.number(key)
        assert f"the machine 'a' has no {key}, which" in str(found.value)
    assert not values.used


@pytest.mark.parametrize(
    ("ranks", "lines", "missing"),
    [
        (1, "", ""),
        (2, "", "no devices_per_node, and the time of a step of 2 ranks"),
        (8, NODE, ""),
        (9, NODE, "no between_nodes.alpha_s, between_nodes.all_gather, between_nodes.reduce_scatter, "),
        (9, f"{NODE}[between_nodes]\n{ALPHA}", "no between_nodes.all_gather, between_nodes.reduce_"),
        (9, f"{NODE}[between_nodes]\n{RATE}", "no between_nodes.alpha_s, between_nodes.reduce_scatter"),
        (9, f"{NODE}[between_nodes]\n{ALPHA}{RATE}", ""),
    ],
)  # fmt: skip
def test_a_link_that_is_missing_is_told_before_a_simulation(ranks, lines, missing):
    machine = parse_machine(HEAD + lines, "a.toml")
    if not missing:
        check_links(machine, ranks)
        return
    with pytest.raises(UsageError) as found:
        check_links(machine, ranks)
    assert f"the machine 'a' has {missing}" in str(found.value)
    assert f"(a100, h100, h200, rtx4090 in {PRESETS})" in str(found.value)


def test_a_plan_looks_for_links_before_it_simulates(tmp_path, monkeypatch):
    monkeypatch.setattr(make_plan, "simulate", None)
    config = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(UsageError, match="16 ranks on nodes of 8 devices"):
        make_plan.make_plan(
            make_plan.Asked("gpt2", config, ranks=16, machine=load_machine("rtx4090"))
        )


def test_an_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"--machine b200: .*or one of a100, h100, h200, rtx4090"):
        load_machine("b200")


@pytest.mark.parametrize("name", presets())
def test_presets_are_read_and_no_number_of_them_is_called_measured(name):
    machine = load_machine(name).model_dump()

    def sources(found):
        if isinstance(found, dict):
            yield from [found["source"]] if "source" in found else []
            for each in found.values():
                yield from sources(each)

    known = list(sources(machine))
    assert len(known) > 20
    assert set(known) == {"vendor", "assumed"}


@pytest.mark.parametrize(
    ("size", "rate"),
    [(1, 10), (10, 10), (1000, 100), (1e5, 1000), (1e9, 1000), (10**4, 316.227766)],
)
def test_a_rate_between_points_is_linear_in_the_logarithms(size, rate):
    assert rate_at([(10, 10), (1000, 100), (1e5, 1000)], size) == pytest.approx(rate)


def test_what_a_measurement_writes_can_be_read():
    numbers = {
        "name": 'a "quoted" name',
        "execution": "serial",
        "devices_per_node": 2,
        "device": {"operation_s": 1.23456e-6, "bytes_per_s": [(4096.0, 1.5e9), (2.0**30, 3e9)]},
    }
    machine = parse_machine(as_toml(numbers), "a.toml")
    assert machine.name == 'a "quoted" name'
    assert machine.devices_per_node.value == 2
    assert machine.device.operation_s.value == 1.235e-6
    assert machine.device.operation_s.source == "measured"
    assert machine.device.bytes_per_s.value == ((4096, 1.5e9), (2.0**30, 3e9))
