#!/usr/bin/env bash
# Builds wheel and sdist of this commit into dist/, checks them, and tries the wheel on each Python.
# `scripts/release.sh 3.11` tries it on that one alone. CONTRIBUTING.md says how to release.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "release: $*" >&2; exit 1; }
[ -z "$(git status --porcelain)" ] || fail "commit first what git status lists"
[ $# -gt 0 ] || set -- 3.11 3.12 3.13

rm -rf dist
uv build --quiet    # the wheel is made from the sdist
wheel=$(echo dist/*.whl)
sdist=$(echo dist/*.tar.gz)
version=$(cut -d- -f2 <<<"$wheel")

uvx --quiet twine check --strict dist/*
others=$(tar -tf "$sdist" | cut -d/ -f2- | grep -vxE \
    '(solo_ext|hydra_plugins|configs)/.*\.(py|yaml|jinja|typed)|[A-Z]+\.(md|cff)|LICENSE|PKG-INFO|pyproject.toml|.gitignore' || true)
[ -z "$others" ] || fail "these do not belong into $sdist: $others"
[ "$(stat -c %s "$sdist")" -lt 2000000 ] || fail "$sdist is larger than 2 MB"

missing=()
for wanted in "$@"; do
    # uv installs a Python that is missing, if it can.
    if python=$(uv python find --no-project "$wanted" 2>/dev/null) ||
        { uv python install --quiet "$wanted" && python=$(uv python find --no-project "$wanted"); }; then
        echo "release: Python $wanted"
        scripts/check_wheel.sh "$wheel" "$python"
    else
        missing+=("$wanted")
    fi
done
[ ${#missing[@]} = 0 ] ||
    fail "not tried, for want of the interpreter: Python ${missing[*]}; name the others to do without"

# Only a commit with a tag is published, and what is written by hand must be of its version.
if [ "$(git describe --tags --exact-match --match 'v*' 2>/dev/null)" = "v$version" ]; then
    grep -qx "version: $version" CITATION.cff || fail "CITATION.cff is not of $version"
    grep -qxE "## $version, [0-9]{4}-[0-9]{2}-[0-9]{2}" CHANGELOG.md ||
        fail "CHANGELOG.md has no heading '## $version, <date>'"
    echo "release: $version is ready: uv publish dist/*"
else
    echo "release: all is well, but this commit has no version tag: $version is not for publishing"
fi
