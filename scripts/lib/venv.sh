# Sourced by scripts/serve and scripts/test, which set $root. `ensure_venv serve` or `ensure_venv test` leaves a .venv there
# with this project and what it needs installed: CUDA jax where there is an NVIDIA GPU, else CPU jax, where the tests also
# get the CUDA compiler alone (`aot`), to compile for GPUs that are not here.
#
# .venv/.installed says what is in it: the checkout's path, pyproject.toml's checksum, the kind of jax, and the extras.
# It is written last, and .venv/.installing stands while pip works: an interrupted install is found and done anew. A .venv
# made by hand has neither file and is installed into. PYTHON names the interpreter to make .venv with, if not the newest.

venv=$root/.venv

say() { printf '%s\n' "$*" >&2; }

ensure_venv() {
    kind=$(jax_kind)
    case $1-$kind in
        serve-cpu) set -- ;;
        serve-*) set -- "$kind" ;;
        test-cpu) set -- test aot ;;
        test-*) set -- test "$kind" ;;
    esac
    if is_ready "$@"; then return; fi
    mkdir -p "$root/.cache"
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$root/.cache/install.lock"
        flock -n 9 || { say "waiting for another install into .venv to end"; flock 9; }
    fi
    if ! is_ready "$@"; then
        make_venv
        install "$@"
    fi
    exec 9>&-
}

# Is .venv complete, made from this pyproject.toml, for this machine, and does it hold these extras?
is_ready() {
    [ -f "$venv/.installed" ] && [ ! -e "$venv/.installing" ] || return 1
    [ "$(sed -n 1p "$venv/.installed")" = "$(stamp)" ] || return 1
    for extra in "$@"; do installed_extras | grep -qx "$extra" || return 1; done
    "$venv/bin/python" -I -c 'import glm_dcp_jax' >/dev/null 2>&1
}

stamp() { printf '%s jax-%s %s\n' "$(cksum <"$root/pyproject.toml")" "$kind" "$root"; }

installed_extras() { [ -f "$venv/.installed" ] && sed 1d "$venv/.installed" || :; }

make_venv() {
    if [ -e "$venv/.installing" ]; then
        why="the last install was interrupted"
    elif [ -f "$venv/.installed" ] && ! grep -q " jax-$kind " "$venv/.installed"; then
        why="it has another jax than this machine needs (jax-$kind)"
    elif [ -e "$venv" ] && ! { is_supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
        why="its Python or its pip does not work, or is not 3.11 to 3.13"
    elif [ -e "$venv" ]; then
        return
    else
        why=
    fi
    python=$(find_python) || exit 1
    say "[1/2] making .venv with $("$python" -V)${why:+, anew: $why}"
    "$python" -m venv --clear "$venv" || exit 1
}

install() {
    wanted=$({ installed_extras; printf '%s\n' "$@"; } | grep . | sort -u || :)
    listed=$(printf '%s' "$wanted" | tr '\n' ',')
    say "[2/2] installing glm-dcp-jax${listed:+[$listed]} with jax for $kind: some minutes the first time"
    started=$(date +%s)
    : >"$venv/.installing"
    (cd "$root" && "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -e ".${listed:+[$listed]}") >&2 || {
        say "error: the install failed; pip's message is above. Run this again once its cause is gone."
        exit 1
    }
    case $listed in *test*) install_nixl ;; esac
    { stamp; printf '%s\n' "$wanted"; } >"$venv/.installed"
    rm "$venv/.installing"
    say "installed in $(($(date +%s) - started)) s"
}

# For the tests of transport nixl. Its dependencies (torch among them) are not needed, so it cannot be an extra.
install_nixl() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || return 0
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps nixl-cu12==1.5.1 >&2 || {
        say "error: NIXL could not be installed; pip's message is above. Run this again once its cause is gone."
        exit 1
    }
}

find_python() {
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "error: no Python 3.11 to 3.13 with the modules venv and ensurepip was found (tried: ${PYTHON:-python3.13," \
        "python3.12, python3.11, python3, python}); install one (on Debian also python3-venv), or name it: PYTHON=path $0"
    return 1
}

is_supported() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# cuda13, cuda12 or cpu: what the NVIDIA driver can run, if there is one.
jax_kind() {
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    if [ -z "$driver" ] && ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
        driver=$(sed -n 's/^NVRM.*[[:space:]]\([0-9]*\)\.[0-9.]*[[:space:]].*/\1/p' /proc/driver/nvidia/version 2>/dev/null)
    fi
    major=${driver%%.*}
    case $major in '' | *[!0-9]*) major=0 ;; esac
    if [ "$major" -ge 580 ]; then
        echo cuda13
    elif [ "$major" -ge 525 ]; then
        echo cuda12
    else
        [ "$major" -eq 0 ] || say "NVIDIA driver $driver is too old for jax (525 or newer): using the CPU"
        echo cpu
    fi
}
