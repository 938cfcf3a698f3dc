"""Scheduled HLO texts made of lines whose modelled times are round numbers."""

from glm_dcp_jax.plan.schedule import Schedule, parse_schedule

HEAD = "HloModule m, is_scheduled=true\n\n"
PARAMETER = "%x = u8[1000]{0} parameter(0)"


def compute(name: str, us: float) -> str:
    """A fusion that XLA models to take so many microseconds."""
    cost = f'{{"exec_time_us":{us},"compute_time_us":0,"memory_access_time_us":{us},"name":""}}'
    return f'%{name} = u8[8]{{0}} fusion(%x), kind=kLoop, calls=%f, backend_config={{"reification_cost":[{cost}]}}'


def scoped(scope: str) -> str:
    return f', metadata={{op_name="jit(step)/shard_map/{scope}/all_gather"}}' if scope else ""


def start(name: str, scope: str = "") -> str:
    """A gather of 1,000 bytes of each of 4 ranks: 3,000 bytes come from others."""
    shape = "(u8[1000]{0}, u8[4000]{0})"
    return f"%{name} = {shape} all-gather-start(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}{scoped(scope)}"


def done(name: str) -> str:
    return f"%{name}.done = u8[4000]{{0}} all-gather-done(%{name})"


def gather(name: str, scope: str = "") -> list[str]:
    """One that the program waits for."""
    return [start(name, scope), done(name)]


def loop(name: str, body: str, trips: int | None) -> str:
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ""
    return f"%{name} = u8[1000]{{0}} while(%x), condition=%c, body=%{body}{known}"


def branches(name: str, *computations: str) -> str:
    listed = ", ".join(f"%{computation}" for computation in computations)
    operands = ", ".join(["%x"] * len(computations))
    return f"%{name} = u8[8]{{0}} conditional(%p, {operands}), branch_computations={{{listed}}}"


def program(*entry: str, **computations: list[str]) -> Schedule:
    """The entry's lines, and those of the computations it calls, by name."""
    parts = [
        "\n".join([f"%{name} (x: u8[1000]) -> u8[8] {{", *(f"  {line}" for line in [PARAMETER, *lines]), "}"])
        for name, lines in computations.items()
    ]
    main = "\n".join(
        ["ENTRY %main (x: u8[1000]) -> u8[8] {", *(f"  {line}" for line in [PARAMETER, *entry]), "}"]
    )
    return parse_schedule(HEAD + "\n\n".join([*parts, main]))
