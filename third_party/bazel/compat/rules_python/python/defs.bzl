# What Bazel before 8 has built in, under the names of the rules that later ones load.
py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
