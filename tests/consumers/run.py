#!/usr/bin/env python3
"""Builds and runs one of the consumer projects beside this file. "stage" installs keel for find_package to find;
plain_include is the compiler alone, with -I and nothing else."""
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house

here = pathlib.Path(__file__).resolve().parent


def must(command, **options):
    code, output = house.run(command, **options)
    if code != 0:
        print(" ".join(str(c) for c in command))
        print(output)
        sys.exit(1)
    return output


def stage(options, work):
    """Installs to one folder and moves the result to another."""
    first, last = work / "first", work / "prefix"
    for folder in (first, last):
        shutil.rmtree(folder, ignore_errors=True)
    must([options.cmake, "--install", options.build, "--prefix", first])
    first.rename(last)


def project(options, work, name):
    build = work / name
    shutil.rmtree(build, ignore_errors=True)
    must([options.cmake, "-S", here / name, "-B", build, "-G", options.generator,
          f"-DCMAKE_CXX_COMPILER={options.compiler}", f"-DCMAKE_PREFIX_PATH={work / 'prefix'}",
          f"-DKEEL_SOURCE={house.root}", f"-DKEEL_FIRST_PREFIX={work / 'first'}", f"-DKEEL_XSIMD_INCLUDE_DIR={options.xsimd}",
          "-DCMAKE_CXX_FLAGS=" + " ".join(house.WARNINGS)])
    must([options.cmake, "--build", build])
    print(must([build / "consumer"]), end="")


def plain_include(options, work):
    work.mkdir(parents=True, exist_ok=True)
    must([options.compiler, "-std=c++20", *house.WARNINGS, *house.include_flags(options.xsimd), here / "main.cpp",
          here / "second.cpp", "-o", work / "plain_include"])
    print(must([work / "plain_include"]), end="")


def main():
    parser = house.arguments()
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--generator", default="Ninja")
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("what", choices=["stage", "find_package", "add_subdirectory", "plain_include"])
    options = parser.parse_args()
    work = options.build / "consumers"
    if options.what == "stage":
        stage(options, work)
    elif options.what == "plain_include":
        plain_include(options, work)
    else:
        project(options, work, options.what)


if __name__ == "__main__":
    main()
