"""Options of ``zeroshard`` itself."""

from __future__ import annotations

from typer.testing import CliRunner

from zeroshard import __version__
from zeroshard.cli.main import main


def test_the_version_is_an_option_and_a_command():
    option, command = CliRunner().invoke(main, ["--version"]), CliRunner().invoke(main, ["version"])
    assert option.exit_code == command.exit_code == 0
    assert option.stdout == command.stdout
    assert option.stdout.startswith(f"zeroshard {__version__}, torch ")


def test_a_shell_can_complete_the_commands(monkeypatch):
    monkeypatch.setenv("_ZEROSHARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "zeroshard la")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert CliRunner().invoke(main, prog_name="zeroshard").stdout.split() == ["launch"]
