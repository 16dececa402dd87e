from batchgen.cli import program

program()
