#!/bin/bash
# hatchling 1.33.0: a symbolic link to a folder can take that folder out of the sdist, and so out of the wheel.
#
# hatchling follows links, and packs a folder that it meets by two paths once, under the path that comes first in the
# alphabet. That holds even where `exclude` names the link: then the folder is nowhere. `python -m build` builds the
# wheel from the sdist, without an error or a warning; a wheel from the checkout is whole.
#
# Output seen:
#   link packed:    package/__init__.py
#   link excluded:  package/__init__.py
#   no link:        package/__init__.py package/data/table.txt
# Exits 0 while that is so, and 1 when the file is in every wheel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install --quiet build==1.6.1 hatchling==1.33.0
mkdir -p project/package/data project/examples
echo 1 > project/package/data/table.txt
touch project/package/__init__.py
ln -s ../package/data project/examples/data
cd project

# Prints the package's files in the wheel of the sdist; $1 is a line for the sdist's table.
wheel() {
    rm -rf dist
    cat > pyproject.toml <<TOML
[build-system]
requires = ["hatchling==1.33.0"]
build-backend = "hatchling.build"
[project]
name = "linked"
version = "1"
[tool.hatch.build.targets.wheel]
packages = ["package"]
[tool.hatch.build.targets.sdist]
$1
TOML
    ../environment/bin/python -m build --no-isolation . >/dev/null
    python3 -m zipfile -l dist/*.whl | awk '/^package/ {print $1}' | sort | xargs
}

packed=$(wheel "")
excluded=$(wheel 'exclude = ["/examples"]')
rm -r examples
without=$(wheel "")
echo "link packed:    $packed"
echo "link excluded:  $excluded"
echo "no link:        $without"
[ "$packed" = package/__init__.py ] && [ "$excluded" = package/__init__.py ] && [[ $without == *table.txt ]]
