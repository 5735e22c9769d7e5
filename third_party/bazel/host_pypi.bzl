"""The Python packages of the interpreter that is on PATH, as @pypi//<name>; nothing is downloaded."""

def _host_pypi_impl(ctx):
    for requirements in ctx.attr.requirements:
        for line in ctx.read(requirements).splitlines():
            name = line.partition("#")[0].strip()
            for end in ["=", "<", ">", "~", "!", "[", ";", " "]:
                name = name.partition(end)[0]
            if name:
                name = name.lower().replace("-", "_").replace(".", "_")
                ctx.file(name + "/BUILD", """\
load("@rules_python//python:defs.bzl", "py_library")

py_library(
    name = "{name}",
    visibility = ["//visibility:public"],
)
""".format(name = name))

host_pypi = repository_rule(
    implementation = _host_pypi_impl,
    attrs = {"requirements": attr.label_list(allow_files = True)},
    local = True,
)
