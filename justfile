# Lists the commands.
default:
    @just --list

# Sets up the environment.
setup:
    uv sync

# Runs tests, all or those of files: `just test tests/losses`.
test *words:
    uv run pytest {{words}}

# Style, types and layers.
lint:
    uv run ruff check .
    uv run ruff format --check .
    uv run mypy
    uv run lint-imports

# Formats the code.
format:
    uv run ruff check --fix .
    uv run ruff format .

# Writes the tables in the documentation from their records.
tables:
    uv run python scripts/update_results.py
    uv run python scripts/update_matrix.py
    uv run python scripts/update_memory.py
    uv run python -m benchmarks.page

# Runs the documentation's notebooks anew, which keep what they show.
notebooks *files:
    uv run python scripts/notebooks.py {{files}}

# Builds the documentation, or shows it: `just docs serve`.
docs *words:
    scripts/docs.sh {{words}}

# Builds wheel and sdist and tries the wheel on every Python, or on those named.
release *pythons:
    scripts/release.sh {{pythons}}

# All of what must hold of every commit.
ci:
    .ci/run
