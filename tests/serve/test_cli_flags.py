"""The command line: vLLM's names, and for anything else one clear line and the right exit code."""

import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from glm_dcp_jax import environment
from glm_dcp_jax.config import FLAGS, REFUSED, ConfigError, SpeculativeConfig
from glm_dcp_jax.config.refused import SO_ANYWAY
from glm_dcp_jax.serve import __main__ as entry
from glm_dcp_jax.serve import flags, tracing

ROOT = Path(__file__).parents[2]


def parse(*argv: str, has_gpu: bool = False) -> flags.Command:
    return flags.parse(argv, has_gpu)


def test_engine_flags_reach_the_configuration():
    config = parse(
        *"some/model -tp 4 -dcp 2 --block-size 16 --cp-kv-cache-interleave-size 4 --max-model-len 99".split(),
        *"--max-num-seqs 3 --dtype bfloat16 --seed -5 --skip-tokenizer-init --gpu-memory-utilization 0.5".split(),
        "--hf-overrides",
        '{"num_hidden_layers": 2}',
    ).config
    assert config.model == "some/model"
    assert (config.parallel.tensor_parallel_size, config.parallel.decode_context_parallel_size) == (4, 2)
    assert (config.cache.block_size, config.cache.cp_kv_cache_interleave_size) == (16, 4)
    assert (config.scheduler.max_model_len, config.scheduler.max_num_seqs) == (99, 3)
    assert (config.dtype, config.seed, config.skip_tokenizer_init) == ("bfloat16", -5, True)
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.hf_overrides == (("num_hidden_layers", 2),)


def test_defaults_are_the_engines_and_loopback():
    command = parse("m")
    assert (command.settings.host, command.settings.port) == ("127.0.0.1", 8000)
    assert command.settings.served_model_names == ("m",) and command.settings.api_keys == ()
    assert (command.config.cache.block_size, command.config.parallel.tensor_parallel_size) == (64, 1)
    assert command.config.scheduler.max_num_batched_tokens == 2048 and not command.demo


def test_server_flags(tmp_path, monkeypatch):
    template = tmp_path / "chat.jinja"
    template.write_text("from a file")
    settings = parse(
        *"--model m --host 0.0.0.0 --port 0 --api-key a --api-key b --served-model-name x y".split(),
        *f"--max-logprobs 5 --log-level debug --chat-template {template}".split(),
    ).settings
    assert (settings.host, settings.port, settings.api_keys) == ("0.0.0.0", 0, ("a", "b"))
    assert settings.served_model_names == ("x", "y")
    assert (settings.max_logprobs, settings.log_level, settings.chat_template) == (5, "debug", "from a file")
    assert settings.metrics_prefix == "vllm:"
    assert parse("m", "--metrics-prefix", "glm_dcp:").settings.metrics_prefix == "glm_dcp:"
    assert parse("m", "--chat-template", "{{ messages }}").settings.chat_template == "{{ messages }}"
    monkeypatch.setenv("VLLM_API_KEY", "from the environment")
    assert parse("m").settings.api_keys == ("from the environment",)
    assert parse("m", "--api-key", "given").settings.api_keys == ("given",)


@pytest.mark.parametrize(
    "argv",
    ["--max_model_len 7 m", "--max-model-len=7 m", "--max_model_len=7 m", "m --max-model-len 7"],
)
def test_spellings_that_vllm_takes(argv):
    command = parse(*argv.split())
    assert (command.config.scheduler.max_model_len, command.config.model) == (7, "m")


def test_auto_length_is_the_default():
    assert parse("m", "--max-model-len", "auto").config.scheduler.max_model_len is None


@pytest.mark.parametrize(
    ("argv", "parallel"),
    [("", (4, 4)), ("-tp 2", (2, 2)), ("-tp 4 -dcp 1", (4, 1)), ("m", (1, 1))],
)
def test_without_a_model_and_a_gpu_the_demo_spreads_over_virtual_devices(argv, parallel):
    command = parse(*argv.split())
    found = command.config.parallel
    assert (found.tensor_parallel_size, found.decode_context_parallel_size) == parallel
    assert command.demo == (argv != "m")


def test_with_a_gpu_the_demo_takes_one():
    command = parse(has_gpu=True)
    assert command.demo and command.config.parallel.tensor_parallel_size == 1
    assert command.settings.served_model_names == (flags.DEMO_NAME,)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("m --block-siz 4", r"unknown flag --block-siz; did you mean --block-size\?"),
        ("m --no-such-thing-at-all", "unknown flag --no-such-thing-at-all$"),
        ("m --max-logprob 4", r"did you mean --max-logprobs\?"),
        ("-x m", "unknown flag"),
        ("m --port eighty", "--port: invalid int value: 'eighty'"),
        ("m --port 70000", "port must be from 0"),
        ("m --port", "--port: expected one argument"),
        ("m --dtype int4", "--dtype: invalid choice: 'int4'"),
        ("m --max-model-len long", "or auto, but is 'long'"),
        (
            "m -tp 4 -dcp 3",
            "decode_context_parallel_size 3 does not divide tensor_parallel_size 4; use one of",
        ),
        ("m --block-size 0", "block_size must be an integer of at least 1"),
        ("m --hf-overrides {", "hf_overrides is not valid JSON"),
        ("m --max-logprobs 99", "max_logprobs must be from 0 to 20, but is 99$"),
        ("m --max-logprobs -1", "but is -1; vLLM's -1, no limit, cannot be had"),
        ("m --chat-template nowhere.jinja", "neither a file nor a jinja template"),
        ("m --chat-template {%if%}", "--chat-template: the chat template does not parse, line 1"),
        ("m --model other", "two models are named, m and other"),
        ("m second", "unrecognized arguments: second"),
        ("m --skip-tokenizer-init --tokenizer t", "--tokenizer says nothing with --skip-tokenizer-init"),
        ("m --served-model-name \udcff", "served_model_name must be Unicode text of one line"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(argv, says, capsys):
    with pytest.raises(ConfigError, match=says):
        parse(*argv.split())
    assert entry.main(argv.split()) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            "m -tp 4 -dcp 3",
            "--decode-context-parallel-size 3 does not divide --tensor-parallel-size 4; use one of",
        ),
        ("m -tp 4 -dcp 4 --dcp-indexer-shards 3", "--dcp-indexer-shards 3 does not divide --decode-context-"),
        ("m --watermark 1.5", "--watermark 1.5 must be"),
        ("m --max-logprobs 99", "--max-logprobs must be from 0"),
        ("m -sc.model draft", "--speculative-config has no key 'model'"),
    ],
)
def test_what_is_printed_names_flags_as_they_are_typed(argv, says, capsys):
    assert entry.main(argv.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize("name", sorted(name for name in REFUSED if True not in SO_ANYWAY.get(name, ())))
def test_vllm_flags_we_do_not_have_are_refused_by_name(name):
    option = "--" + name.replace("_", "-")
    for argv in ([option, "2", "m"], [f"{option}=2", "m"], ["m", option], [f"--{name}", "2", "m"]):
        with pytest.raises(ConfigError) as raised:
            parse(*argv)
        assert str(raised.value) == f"{option} is not supported: {REFUSED[name]}"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("-pp 2 m", "-pp is not supported: .*--tensor-parallel-size"),
        ("-dp 2 m", "-dp is not supported"),
        ("m --no-enable-chunked-prefill", "prefill is always chunked"),
        ("m --tp 4", "unknown flag --tp; it is -tp here"),
        ("m --context-length 4096", "it is --max-model-len here"),
        ("m --no-enable-auto-tool-choice", "--tool-call-parser none"),
        ("m --tool-parser-plugin x.py", "has GLM's own"),
        ("m --tool-call-parser hermes", "tool-call-parser.*invalid choice.*glm47"),
        ("m --uds /run/x", "--host and --port"),
    ],
)
def test_other_forms_of_refused_flags(argv, says):
    with pytest.raises(ConfigError, match=says):
        parse(*argv.split())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("4K", 4096),
        ("4k", 4000),
        ("25.6k", 25_600),
        ("1M", 2**20),
        ("auto", None),
        ("-1", None),
    ],
)
def test_lengths_are_written_as_in_vllm(text, tokens):
    assert parse("m", "--max-model-len", text).config.scheduler.max_model_len == tokens


@pytest.mark.parametrize("text", ["4.5K", "k", "4kk", "-4", "1e3", "", "٤", "9" * 5000, "9" * 400 + "k"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="must be a number such as 4096, 4K"):
        parse("m", f"--max-model-len={text}")


@pytest.mark.parametrize(
    "argv",
    [
        ["m", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'],
        "m --speculative-config.method mtp --speculative-config.num_speculative_tokens 3".split(),
        "--speculative_config.num_speculative_tokens=3 m --speculative-config.method=mtp".split(),
        "-sc.num_speculative_tokens 3 m".split(),
    ],
)
def test_objects_are_json_or_given_key_by_key(argv):
    command = parse(*argv)
    assert command.config.model == "m"
    assert command.config.speculative == SpeculativeConfig(3, "mtp")


def test_any_object_can_be_given_key_by_key():
    config = parse("m", "--hf-overrides.num_hidden_layers", "2", "--hf-overrides.dtype=bfloat16").config
    assert config.hf_overrides == (("num_hidden_layers", 2), ("dtype", "bfloat16"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("m --speculative-config.method", "--speculative-config.method needs a key and a value"),
        ("m --speculative-config. 3", "--speculative-config. needs a key and a value"),
        ("m -sc {} -sc.method mtp", "--speculative-config is given both as an object and key by key"),
        ("m --speculative-config.model draft", "speculative_config has no key 'model'"),
        ("m --speculative-config mtp", "speculative_config is not valid JSON"),
        ("m --block-size.x 3", "--block-size takes one value; it has no key 'x'"),
    ],
)
def test_objects_that_cannot_be_read(argv, says):
    with pytest.raises(ConfigError, match=says):
        parse(*argv.split())


@pytest.mark.parametrize(
    "asked",
    [
        "--trust-remote-code --enable-chunked-prefill --disable-log-requests --no-enable-log-requests",
        "-pp 1 -dp 1 --pipeline_parallel_size=1 --data-parallel-size 1 -dp=1 --load-format auto",
        "--enable-prompt-tokens-details --enable-server-load-tracking --disable-frontend-multiprocessing",
        "--no-trust-remote-code --swap-space 0 --enable-request-id-headers",
    ],
)
def test_a_command_line_of_vllm_may_ask_for_what_is_so_anyway(asked):
    assert parse("m", *asked.split()) == parse(*asked.split(), "m") == parse("m")


def test_so_may_a_file_of_flags(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("model: m\ntrust-remote-code: true\npipeline-parallel-size: 1\nenable-lora: false\n")
    assert parse("--config", str(file)) == parse("m")
    file.write_text("model: m\npipeline-parallel-size: 2\n")
    with pytest.raises(ConfigError, match="pipeline-parallel-size is not supported"):
        parse("--config", str(file))


def test_all_flags_that_cannot_be_are_named_at_once(capsys):
    assert entry.main("m -pp 2 --enforce-eager --nope -1 --revision main -pp 2 --port 0".split()) == 2
    said = capsys.readouterr().err
    for reason in ("-pp is not", "--enforce-eager is not", "unknown flag --nope", "--revision is not"):
        assert said.count(reason) == 1
    assert said.count("\n") == 1 and "unknown flag -1" not in said


def test_switching_off_what_is_not_there_changes_nothing():
    assert parse("m", "--no-enable-lora", "--no_enforce_eager") == parse("m")


@pytest.mark.parametrize("name", ["enable-prefix-caching", "async-scheduling"])
def test_what_is_on_can_be_switched_off(name):
    def on(*arguments: str) -> bool:
        config = parse("m", *arguments).config
        return config.cache.enable_prefix_caching if "prefix" in name else config.scheduler.async_scheduling

    assert on() and on(f"--{name}") and not on(f"--no-{name}")


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^([a-z][^\n]*):$", shown, re.MULTILINE) == [
        "positional arguments",
        "options",
        "server",
        "browsers and proxies",
        "logs, metrics and profiles",
        *flags._ENGINE_GROUPS.values(),
    ]
    for option in [*(flag.option for flag in FLAGS), "--api-key", "--served-model-name", "-dcp", "--port"]:
        assert option in shown


def test_the_command_line_is_judged_before_jax_is_loaded():
    code = "import sys; from glm_dcp_jax.serve.__main__ import main; main(['--nope']); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_taken_port_is_said_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(entry, "_load", lambda command: pytest.fail("loaded a model for nothing"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert entry.main(["m", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_a_profilers_directory_is_made_or_refused_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(entry, "_load", lambda command: pytest.fail("loaded a model for nothing"))
    (tmp_path / "file").touch()
    assert entry.main(["m", "--port", "0", "--profiler-dir", str(tmp_path / "file" / "in")]) == 1
    said = capsys.readouterr().err
    assert said == f"error: --profiler-dir {tmp_path}/file/in cannot be written: Not a directory\n"
    tracing.check_directory(str(tmp_path / "new" / "in"))
    assert list((tmp_path / "new" / "in").iterdir()) == []


@pytest.mark.parametrize("error", [ConfigError("no config.json in m"), FileNotFoundError("m")])
def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(error, capsys, monkeypatch):
    class Engine:
        @staticmethod
        def from_config(config):
            raise error

    module = types.ModuleType("glm_dcp_jax.engine.async_engine")
    module.AsyncEngine = Engine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert entry.main(["m", "--port", "0", "--log-level", "error"]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("flag", ["--reasoning-parser", "--tool-call-parser"])
def test_a_parser_without_a_tokenizer_is_refused(flag, tmp_path, capsys, monkeypatch):
    assert entry.main(["m", "--skip-tokenizer-init", flag, "glm47"]) == 2
    assert f"error: {flag} glm47 needs a tokenizer, and --skip-tokenizer-init" in capsys.readouterr().err
    for choice in ("auto", "none"):
        assert parse("m", "--skip-tokenizer-init", flag, choice).config.skip_tokenizer_init
    monkeypatch.setattr(
        "glm_dcp_jax.engine.async_engine.AsyncEngine.from_config", lambda config: pytest.fail("loaded it")
    )
    (tmp_path / "config.json").write_text("{}")
    assert entry.main([str(tmp_path), "--port", "0", "--log-level", "error", flag, "glm45"]) == 1
    assert capsys.readouterr().err == (
        f"error: {flag} glm45 needs a tokenizer, and {tmp_path} has no tokenizer.json; give one with --tokenizer, or "
        "use auto or none\n"
    )


def test_more_virtual_devices_than_a_machine_bears_are_refused_before_jax_starts(monkeypatch, capsys):
    monkeypatch.setattr(environment, "has_nvidia_gpu", lambda: False)
    assert entry.main("m --port 0 --log-level error -tp 200".split()) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: 200 virtual CPU devices") and "--tensor-parallel-size" in said
    assert "at most 64" in said and "at most 64" in next(f.help for f in FLAGS if f.short == "-tp")


def test_the_demo_compiles_few_steps_unless_told_otherwise():
    few = flags.parse([], has_gpu=False).config.scheduler
    assert (few.max_num_batched_tokens, few.max_num_seqs) == (128, 8)
    assert (few.precompile_token_paddings, few.precompile_bs_paddings) == ((128,), (1, 8))
    told = flags.parse(
        ["--max-num-batched-tokens", "64", "--max-num-seqs", "2"], has_gpu=False
    ).config.scheduler
    assert (told.max_num_batched_tokens, told.max_num_seqs) == (64, 2)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([""], "model's name is empty"),
        (["--model", ""], "model's name is empty"),
        (["m", "--tokenizer", ""], "--tokenizer is empty"),
        (["m", "--api-key", "schlüssel"], "--api-key must be ASCII"),
        (["m", "--api-key", "from-a-file\n"], "--api-key must have no line end"),
        (["m", "--api-key", "a", " b"], "--api-key must have no line end"),
        (["m", "--host", ""], "--host is empty; name an address"),
    ],
)
def test_empty_names_and_keys_no_header_can_hold_are_wrong_command_lines(argv, says, capsys):
    assert entry.main(argv) == 2
    assert says in capsys.readouterr().err


def test_a_chat_template_file_that_is_not_utf_8_is_named(tmp_path, capsys):
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xff\xfe{{ messages }}")
    assert entry.main(["m", "--chat-template", str(file)]) == 2
    assert f"{file} is not UTF-8" in capsys.readouterr().err
