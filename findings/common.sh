# Sourced by every finding: a temporary folder, an environment of pinned packages in it, a bound on the time.
# A finding ends with 0 as described, with 1 if the behaviour changed, with 77 if something that it needs is missing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

skip() {
    echo "skipped: needs $1"
    exit 77
}

# packages NAME==VERSION …: install them in an environment of their own; `findings/run` keeps it for its other scripts
packages() {
    python3 -c "import sys, venv; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || skip "Python 3.11 with venv"
    local kept="${FINDINGS_ENVIRONMENTS:-$scratch}"
    environment="$kept/$(printf '%s-' python "$@" | tr -c 'a-zA-Z0-9.\n-' '-')"
    [ -e "$environment/.installed" ] && return
    python3 -m venv "$environment" >/dev/null || skip "Python with ensurepip (python3-venv)"
    [ "$#" -eq 0 ] || timeout 300 "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >"$scratch/pip.log" 2>&1 ||
        skip "$* from the package index: $(tail -n 1 "$scratch/pip.log")"
    touch "$environment/.installed"
}

# modules NAME@VERSION …: install npm packages; `node` finds them in the folder $modules
modules() {
    command -v npm >/dev/null || skip "Node.js with npm"
    export modules="${FINDINGS_ENVIRONMENTS:-$scratch}/$(printf '%s-' node "$@" | tr -c 'a-zA-Z0-9.\n-' '-')"
    [ -e "$modules/.installed" ] && return
    mkdir -p "$modules"
    (cd "$modules" && echo '{"private": true}' >package.json &&
        timeout 300 npm install --silent --no-audit --no-fund --ignore-scripts "$@" >"$scratch/npm.log" 2>&1) ||
        skip "$* from npm: $(tail -n 1 "$scratch/npm.log")"
    touch "$modules/.installed"
}

# debian_packages RELEASE NAME=VERSION …: unpack packages of that Debian into $scratch/debian, and install nothing
debian_packages() {
    command -v apt-get >/dev/null && grep -q "^VERSION_ID=\"$1\"" /etc/os-release || skip "Debian $1 with apt"
    mkdir "$scratch/debian" "$scratch/packages"
    chmod 755 "$scratch" "$scratch/packages" # apt fetches as a user of its own
    (cd "$scratch/packages" && timeout 120 apt-get -qq download "${@:2}" >"$scratch/apt.log" 2>&1) ||
        skip "${*:2} from Debian: $(tail -n 1 "$scratch/apt.log")"
    for each in "$scratch"/packages/*.deb; do
        dpkg-deb -x "$each" "$scratch/debian"
    done
    export DEBIAN_ROOT="$scratch/debian"
}

# bounded SECONDS: run the Python of standard input in that environment; what is left after this time is ended
bounded() {
    local status=0
    TMPDIR="$scratch" PYTHONPATH="$here/.." PYTHONDONTWRITEBYTECODE=1 \
        timeout --kill-after=5 "$1" "$environment/bin/python" - || status=$?
    [ "$status" -eq 124 ] && echo "changed: no end within $1 s"
    [ "$status" -eq 0 ] || exit 1
}
