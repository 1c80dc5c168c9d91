# Sourced by demo.sh and test.sh, in the project's directory.

# make_environment EXTRA: a .venv with this project and that extra; done already, it returns at once.
make_environment() {
    local extra=$1 stamp constraints=(-c constraints.txt)
    # With an NVIDIA GPU pip chooses the build of torch; without one, the pinned build keeps it from choosing gigabytes.
    if [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null; then constraints=(); fi
    stamp=".venv/installed-$extra-$(cat pyproject.toml constraints.txt | cksum | tr ' ' -)"
    if [ -e "$stamp" ]; then return; fi
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        echo "Making .venv" >&2
        "$(find_python)" -m venv --clear .venv
    fi
    echo "Installing into .venv (once)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${constraints[@]}" --editable ".[$extra]"
    touch "$stamp"
}

find_python() {
    local python
    for python in python3.11 python3 python3.12 python3.13 python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "error: Python 3.11 or later is needed" >&2
    return 1
}
