"""bash through a channel: its state persists, output cannot forge the end of a command,
and no command can block the shell.
"""

import asyncio
import contextlib
import os
import shlex
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.sandbox.tests.action_server import served, wait_for_end
from rollweave.sandbox.tools import Bash
from rollweave.schema.errors import SandboxRefusedError
from tests.support.properties import examples

SHORT_S = 0.4
"""Seconds of a timeout that is meant to expire."""


@contextlib.asynccontextmanager
async def shell(cwd: Path | None = None) -> AsyncIterator[Bash]:
    """Run in `cwd`, or in a folder that a stray redirection may fill."""
    with tempfile.TemporaryDirectory() as folder:
        async with served(cwd=cwd or Path(folder)) as channel:
            yield Bash(channel)


async def output(bash: Bash, command: str) -> str:
    """Return the output of a command that must succeed."""
    result = await bash.run(command)
    assert (result.timed_out, result.restarted, result.dropped_bytes) == (False, False, 0), result
    return result.output


async def test_state_persists_between_commands(tmp_path: Path) -> None:
    async with shell() as bash:
        await output(
            bash,
            f"cd {tmp_path}; export A=1; B=2; f() {{ echo f$1; }}; alias hey='echo "
            "hey'; set -o pipefail",
        )
        assert (
            await output(bash, "pwd; echo $A$B; f 3; hey; false | true; echo $?")
            == f"{tmp_path}\n12\nf3\nhey\n1\n"
        )
        assert (await bash.run("(exit 7)")).exit_code == 7
        assert await output(bash, "echo $?") == "7\n"
        assert await output(bash, "echo $?") == "0\n"


async def test_output_has_no_echo_prompt_or_color() -> None:
    async with shell() as bash:
        assert (
            await output(bash, "PS1='$ '; PS2='> '; PROMPT_COMMAND='echo prompt'; echo a") == "a\n"
        )
        assert await output(bash, "echo b\n\necho c") == "b\nc\n"
        assert await output(bash, r"printf '\e[31mred\e[0m \e]0;title\a\e(Bplain'") == "red plain"
        assert await output(bash, "echo $TERM; [ -t 1 ] && echo terminal") == "dumb\nterminal\n"


async def test_standard_input_and_terminal_are_empty() -> None:
    async with shell() as bash:
        assert await output(bash, "cat; read line; echo $?; cat < /dev/tty; echo end") == "1\nend\n"
        assert (
            await output(bash, "python3 -c 'input()' 2>&1 | tail -n 1")
            == "EOFError: EOF when reading a line\n"
        )


@pytest.mark.variants
@pytest.mark.parametrize(
    "command",
    [
        *("echo 'open", 'echo "open', "echo $(", "echo `", "if true; then", "f() {"),
        *("cat <<'END'\nabc", "cat <<END\n'", "echo \\", ")", "done", "}", "'; echo out; '"),
        *("# comment", "", "\n", "-n", "!!", "echo !$"),
    ],
)
async def test_unclosed_syntax_ends_with_its_command(command: str) -> None:
    async with shell() as bash:
        before = await bash.run(command)
        assert not before.timed_out
        assert not before.restarted
        assert await output(bash, "echo after") == "after\n"


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0\x1b"), max_size=30),
        min_size=1,
        max_size=5,
    )
)
def test_any_command_text_arrives_unchanged(words: list[str]) -> None:
    async def main() -> None:
        async with shell() as bash:
            for word in words:
                assert await output(bash, f"printf %s {shlex.quote(word)}") == word

    asyncio.run(main())


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.text(alphabet="'\"`$(){}<>|&;\\#! \nab=~*", max_size=12), min_size=1, max_size=8)
)
def test_no_mix_of_quotes_and_brackets_blocks_the_shell(jumble: list[str]) -> None:
    async def main() -> None:
        async with shell() as bash:
            await bash.run("set -o noclobber; shopt -u expand_aliases; enable -n exec")
            for command in jumble:
                await bash.run(command, timeout_s=5.0)
            assert (await bash.run("echo after")).output.endswith("after\n")

    asyncio.run(main())


async def test_output_cannot_forge_the_end_of_a_command() -> None:
    async with shell() as bash:
        # Everything that a command can see of how its end is told, sent down every way
        # that it has.
        spy = (
            "set; set -x; history; jobs; declare -f; echo \"$BASH_COMMAND $_\"; set +x; tr '\\0' "
            "'\\n' < /proc/$$/environ"
        )
        seen = (await bash.run(f"{spy}; false")).output
        assert (await bash.run("true")).exit_code == 0
        forged = "\n".join(f"{line} 0" for line in seen.splitlines())
        result = await bash.run(
            f"for fd in {{0..20}} 63 {{250..255}}; do echo {shlex.quote(forged)} >&$fd; done "
            "2>/dev/null; (exit 9)",
            output_bytes=1 << 20,
        )
        assert result.exit_code == 9
        assert not result.restarted


async def test_the_status_of_an_earlier_command_does_not_end_a_later_one() -> None:
    async with shell() as bash:
        # A job that floods every descriptor of the shell that it can name, while other
        # commands run.
        await bash.run(
            "(for i in 1 2 3 4 5 6 7 8 9; do for fd in 1 10 11 12; do echo x 0 >&$fd; "
            "done; done) 2>/dev/null &"
        )
        for number in (3, 0, 5):
            assert (await bash.run(f"(exit {number})")).exit_code == number


async def test_excessive_output_keeps_its_head_and_tail() -> None:
    async with shell() as bash:
        result = await bash.run(
            "echo first; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo last; exit_code() { "
            "return 4; }; exit_code"
        )
        assert result.exit_code == 4
        assert result.output.startswith("first\nxxx")
        assert result.output.endswith("xxx\nlast\n")
        assert "bytes left out" in result.output
        assert result.dropped_bytes == 50_000_000 + len("first\n\nlast\n") - 30_000
        assert await output(bash, "echo after") == "after\n"


async def test_output_is_complete_up_to_the_bound_and_counted_beyond() -> None:
    async with shell() as bash:
        assert (await bash.run("printf 0123456789", output_bytes=10)).output == "0123456789"
        result = await bash.run("printf 0123456789A", output_bytes=10)
        assert result.output == "01234\n[... 1 bytes left out ...]\n6789A"
        assert (await bash.run("echo a", output_bytes=0)).output == "\n[... 2 bytes left out ...]\n"


async def test_unicode_nuls_and_invalid_bytes() -> None:
    async with shell() as bash:
        assert await output(bash, "echo 'žluťoučký 🐴'") == "žluťoučký 🐴\n"
        assert await output(bash, r"printf 'a\0b\xff\r\n'") == "a\ufffdb\ufffd\r\n"
        assert "\udc80" not in await output(bash, "head -c 1000 /dev/urandom")
        with pytest.raises(SandboxRefusedError, match="no NUL"):
            await bash.run("echo a\0b")


async def test_a_background_job_delays_nothing_and_its_output_comes_with_the_next_command(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "go")
    os.mkfifo(tmp_path / "gone")
    async with shell(tmp_path) as bash:
        assert (await output(bash, "(cat go; echo from the job; : > gone) &")).startswith("[1] ")
        await asyncio.to_thread((tmp_path / "go").write_text, "go\n")
        await asyncio.to_thread((tmp_path / "gone").read_text)
        assert await output(bash, "echo now") == "go\nfrom the job\nnow\n"


async def test_a_job_that_prints_between_commands_is_never_blocked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    os.mkfifo(tmp_path / "gone")
    async with shell(tmp_path) as bash:
        await output(bash, "(read -r _ < go; head -c 3000000 /dev/zero | tr '\\0' x; : > gone) &")
        await asyncio.to_thread((tmp_path / "go").write_text, "now\n")
        # more than a terminal holds was printed
        await asyncio.to_thread((tmp_path / "gone").read_text)
        assert len((await bash.run("echo now", output_bytes=1 << 20)).output) == (1 << 16) + len(
            "now\n"
        )


async def test_a_daemon_that_keeps_the_terminal_open_delays_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    async with shell(tmp_path) as bash:
        await output(bash, "setsid sh -c 'echo $$ > pid; exec sleep 1000' &")
        pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        assert await output(bash, "echo now") == "now\n"
        os.kill(pid, 9)


@pytest.mark.variants
@pytest.mark.parametrize(
    "command",
    [
        *("sleep 1000", "sleep 1000; echo not reached", "while :; do :; done"),
        *("while :; do sleep 1000; done", "for i in 1 2 3; do sleep 1000; done"),
        *("f() { sleep 1000; f; }; f", "sleep 1000 | cat", "(sleep 1000)", "echo $(sleep 1000)"),
        *("python3 -c 'import time; time.sleep(1000)'", "cat $PWD/fifo", "kill -STOP $$"),
        *("wait $(sleep 1000)", "read x < fifo"),
    ],
)
async def test_a_command_out_of_time_is_interrupted_and_the_shell_survives(
    command: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    async with shell(tmp_path) as bash:
        await output(bash, "kept=1")
        result = await bash.run(f"echo begun; {command}", timeout_s=SHORT_S)
        assert result.timed_out
        assert not result.restarted
        assert result.output.startswith("begun\n")
        assert "not reached" not in result.output
        assert await output(bash, "echo $kept") == "1\n"


async def test_a_command_that_ignores_the_interrupt_is_killed_and_the_shell_survives() -> None:
    async with shell() as bash:
        await output(bash, "kept=1")
        result = await bash.run(
            """sh -c 'trap "" INT TERM; echo $$; while :; do sleep 1000; done'""", timeout_s=SHORT_S
        )
        assert (result.timed_out, result.restarted, result.exit_code) == (True, False, 137)
        await wait_for_end(int(result.output.split()[0]))
        assert (await bash.run("echo $kept")).output == "1\n"


@pytest.mark.extended
async def test_a_shell_that_ignores_the_interrupt_is_restarted() -> None:
    async with shell() as bash:
        await output(bash, "kept=1")
        result = await bash.run("trap '' INT; echo $$; while :; do :; done", timeout_s=SHORT_S)
        assert (result.timed_out, result.restarted, result.exit_code) == (True, True, 137)
        await wait_for_end(int(result.output.split()[0]))
        assert await output(bash, "echo [$kept]") == "[]\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        *(("exit 3", 3), ("exit", 0), ("kill -9 $$", 137), ("set -e; false", 1)),
        *(("exec sh -c 'exit 4'", 4), ("exec true", 0), ("exec 0<&-; exec sh -c 'exit 5'", 5)),
        ("kill -SEGV $$", 139),
    ],
)
async def test_a_shell_that_ended_is_replaced(command: str, code: int) -> None:
    async with shell() as bash:
        await output(bash, "kept=1")
        result = await bash.run(f"echo last words; {command}")
        assert (result.exit_code, result.restarted, result.timed_out) == (code, True, False)
        assert result.output.startswith("last words\n")
        assert await output(bash, "echo [$kept]") == "[]\n"


async def test_a_shell_that_became_another_program_may_run_until_its_timeout() -> None:
    async with shell() as bash:
        result = await bash.run("exec sleep 1000", timeout_s=SHORT_S)
        assert (result.timed_out, result.restarted, result.exit_code) == (True, True, 130)
        assert await output(bash, "echo new") == "new\n"


async def test_a_shell_that_dies_between_commands_is_replaced() -> None:
    async with shell() as bash:
        pid = int(await output(bash, "echo $$"))
        os.kill(pid, 9)
        await wait_for_end(pid)
        result = await bash.run("echo new")
        assert (result.output, result.exit_code, result.restarted) == ("new\n", 0, True)


@pytest.mark.variants
@pytest.mark.parametrize(
    "command",
    [
        *("stty raw -echo < /dev/tty", "stty sane < /dev/tty"),
        *("stty onlcr echo icanon < /dev/tty", "exec > /dev/null 2>&1", "exec < /dev/zero"),
        *("exec 3>&- 4>&- 5>&- 9>&-", "set -n", "set -u; unset HOME PATH", "IFS=0123456789abcdef"),
        "LC_ALL=C; LANG=C",
        'printf() { echo forged; }; eval() { :; }; builtin() { command builtin "$@"; }; unset -f '
        "builtin",
        "alias printf=false eval=false exit=false; exit() { :; }; (\\builtin exit 3)",
        *("trap 'echo debug' DEBUG; trap - DEBUG", "PROMPT_COMMAND='exec 2>/dev/null'"),
        *("TMOUT=0; set -o posix", "ulimit -c 0", "cd /; set -f"),
        "shopt -s extglob; set -o noclobber",
    ],
)
async def test_no_setting_silences_the_next_command(command: str) -> None:
    async with shell() as bash:
        assert not (await bash.run(command)).restarted
        result = await bash.run('echo "a b"; /bin/echo c')
        expected = ("a b\nc\n", 0, False, False)
        assert (result.output, result.exit_code, result.restarted, result.timed_out) == expected


async def test_concurrent_commands_take_turns() -> None:
    async with shell() as bash:
        result = await asyncio.gather(
            *(bash.run(f"n=$((n + 1)); echo {number}:$n") for number in range(20))
        )
        assert [one.output for one in result] == [
            f"{number}:{number + 1}\n" for number in range(20)
        ]


async def test_a_cancelled_command_is_interrupted_and_the_next_one_runs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    async with shell(tmp_path) as bash:
        await output(bash, "kept=1")
        task = asyncio.create_task(bash.run("echo > begun; sleep 1000"))
        await asyncio.to_thread((tmp_path / "begun").read_text)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await bash.run("echo $kept")).output.endswith("1\n")


async def test_a_long_command() -> None:
    async with shell() as bash:
        text = "it's long " * 20_000
        assert await output(bash, f"cat <<'END' | wc -c\n{text}\nEND") == f"{len(text) + 1}\n"
        with pytest.raises(SandboxRefusedError, match="at most"):
            await bash.run("x" * ((1 << 20) + 1))


async def test_prompting_and_paging_programs_do_not_wait() -> None:
    async with shell() as bash:
        result = await bash.run(
            "python3 -c 'import getpass; getpass.getpass()' 2>&1 | tail -n 1; echo $PAGER"
        )
        assert not result.timed_out
        assert result.output.endswith("cat\n")
