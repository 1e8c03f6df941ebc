"""dry_test.py FOLDER: tests the GPU benchmarks without a GPU. FOLDER has their programs, built with a stand-in for CUDA.

run.sh runs the programs at tiny sizes. The table must have every row, with the bytes and operations that expected.py
derives. Then the table is made from results that this test writes. The page of expected figures must equal the output of
expected.py.
"""
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

import expected
import rows
import table

HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = pathlib.Path()
TINY = expected.Shape(tokens=32, microbatches=2, hidden=64, layers=2, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=96,
                      optimizer_layers=1, table_rows=8)
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
VECTOR_KERNELS = """
#include "plait/kernels/cuda/norms.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
using plait::bf16;
void use(plait::cuda& d, bf16* x, float* s) {
  plait::kernels::norm_forward<bf16>(d, x, x, nullptr, x, nullptr, s, 1, 8, 1e-5);
  plait::kernels::norm_backward<bf16>(d, x, x, x, nullptr, s, x, s, nullptr, 1, 8);
  plait::kernels::swiglu_forward<bf16>(d, x, x, 1, 8);
  plait::kernels::swiglu_backward<bf16>(d, x, x, x, 1, 8);
}
"""
FAKE_PYTHON = """#!/bin/sh
case "$1" in
  *pytorch_step.py) for what in $3.tokens_per_second attention.$3.forward attention.$3.backward; do
      echo '{"id": "pytorch.'$what'", "value": 1.0}'; done ;;
  *) exec python3 "$@" ;;
esac
"""


def script(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Run(unittest.TestCase):
    """Tests run.sh with scripts in place of a GPU, a build and PyTorch."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.home = pathlib.Path(cls.folder.name)
        for name in ("bin", "build"):
            (cls.home / name).mkdir()
        script(cls.home / "bin/nvidia-smi", "#!/bin/sh\necho 'NVIDIA Stand In, 9.0'\n")
        script(cls.home / "python", FAKE_PYTHON)
        for program in ("memory", "linears", "attention", "choices", "step", "collective"):
            script(cls.home / f"build/bench_cuda_{program}",
                   f'#!/bin/sh\nexec "{PROGRAMS.resolve()}/dry_cuda_{program}" --tiny "$@"\n')
        cls.done = cls.run_script(cls, "memory,linears,attention,choices,collective,step,pytorch")
        cls.results = {}
        for file in (cls.home / "out").glob("*.jsonl"):
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                cls.results[entry["id"]] = entry

    @classmethod
    def tearDownClass(cls) -> None:
        cls.folder.cleanup()

    def run_script(self, only: str, *more: str) -> subprocess.CompletedProcess:
        environment = dict(os.environ, PATH=f"{self.home}/bin:{os.environ['PATH']}")
        return subprocess.run(["sh", HERE / "run.sh", "--only", only, "--out", self.home / "out", "--build",
                               self.home / "build", "--results", self.home / "tables", "--python", self.home / "python",
                               *more], capture_output=True, text=True, env=environment)

    @contextlib.contextmanager
    def standing_in(self, program: str, text: str):
        """Replaces a program by a script, and brings back the program and all results afterwards."""
        file = self.home / f"build/bench_cuda_{program}"
        kept = {path: path.read_text() for path in (file, *(self.home / "out").glob("*.jsonl"))}
        script(file, text)
        try:
            yield
        finally:
            for path, content in kept.items():
                path.write_text(content)

    def test_every_row_is_there(self) -> None:
        self.assertEqual(self.done.returncode, 0, self.done.stdout + self.done.stderr)
        self.assertIn("0 rows missing", self.done.stdout)
        for row in rows.rows():
            if not row.optional and not row.id.endswith(".ratio"):
                self.assertIn(row.id, self.results)
                if row.id != "collective.types" and row.id != "collective.overhead":  # differences
                    self.assertGreater(self.results[row.id]["value"], 0, row.id)
        tables = list((self.home / "tables").iterdir())
        self.assertEqual(len(tables), 1)
        self.assertTrue(tables[0].name.startswith("nvidia-stand-in-"), tables)
        self.assertIn("# NVIDIA Stand In", tables[0].read_text())

    def test_bytes_and_operations_are_the_derived_ones(self) -> None:
        for name in rows.MEMORY:
            given, distinct = self.results[f"memory.{name}"]["bytes"], 0
            if name.startswith("embedding"):
                per_id = TINY.hidden * (2 if name == "embedding_forward" else 8)
                distinct = (given - expected.memory_bytes(name, TINY, 0)) / per_id
                self.assertEqual(distinct, int(distinct))
                self.assertTrue(1 <= distinct <= min(TINY.tokens, TINY.vocab), distinct)
            self.assertEqual(given, expected.memory_bytes(name, TINY, int(distinct)), name)
        for name in rows.LINEARS:
            for key in rows.PASSES:
                self.assertEqual(self.results[f"linears.{name}.{key}"]["operations"],
                                 expected.linear_operations(name, TINY), f"{name} {key}")
        for seq in rows.SEQUENCES:
            for direction in ("forward", "backward"):
                self.assertEqual(self.results[f"attention.own.{seq}.{direction}"]["operations"],
                                 expected.attention_operations(direction, TINY, seq // 256))
            self.assertEqual(self.results[f"step.{seq}.mfu"]["operations_per_token"],
                             expected.model_operations(TINY, seq // 256) / TINY.tokens)
            self.assertEqual(self.results[f"step.{seq}.launched.over_kernels"]["launches"], expected.launches(TINY))
        for name, steps in (("rms_norm_forward", 2 * 2 * 2 + 2), ("swiglu_backward", 2 * 2), ("cross_entropy_forward", 2),
                            ("merge_lse", 0), ("adamw", TINY.parameters() / TINY.layer_parameters())):
            self.assertAlmostEqual(self.results[f"memory.{name}"]["step_calls"], steps, 3, name)

    def test_a_step_that_fails_is_named_and_the_rest_is_reported(self) -> None:
        (self.home / "build/bench_cuda_linears").rename(self.home / "build/hidden")
        try:
            done = self.run_script("tests,linears,memory", "--quick")
        finally:
            (self.home / "build/hidden").rename(self.home / "build/bench_cuda_linears")
        self.assertEqual(done.returncode, 1)
        for text in ("FAILED tests", "no tests were built", "FAILED linears", "bench_cuda_linears was not built",
                     "ok memory", "30 rows missing", "FAILED: tests (exit code 1", "FAILED: linears (exit code 1"):
            self.assertIn(text, done.stdout)
        self.assertEqual(self.run_script("linears").returncode, 0)

    def test_a_step_that_does_not_fit_is_measured_with_half_the_tokens(self) -> None:
        with self.standing_in("step", """#!/bin/sh
case "$*" in
  *8192*) echo '{"id": "step.2048.mfu", "value": 0.5, "seq": "'"$*"'"}' ;;
  *) echo 'out of memory' >&2; exit 1 ;;
esac
"""):
            done = self.run_script("step-2048")
            after = (self.home / "out/step-2048.jsonl").read_text()
        self.assertEqual(done.returncode, 1)
        self.assertIn("out of memory\nthe step failed with all tokens; again with 8192", done.stdout)
        self.assertEqual(json.loads(after)["seq"], "--seq 2048 --tokens 8192")

    def test_a_run_ends_in_time(self) -> None:
        done = self.run_script("memory", "--limit", "4")
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED memory: not run, --limit is 4", done.stdout)
        self.assertIn("0 rows missing", done.stdout)  # those of the run before
        with self.standing_in("collective", "#!/bin/sh\nsleep 60\n"):
            done = self.run_script("collective", "--limit", "9")
        self.assertRegex(done.stdout, "FAILED collective: ran past its limit of [1-4] s")
        self.assertEqual(self.run_script("collective").returncode, 0)

    def test_wrong_arguments_are_refused(self) -> None:
        for only, more, text in (("memory,speed", [], "--only names 'speed'; legal are configure build"),
                                 ("memory", ["--limit", "soon"], "--limit is 'soon', must be a number of seconds"),
                                 ("memory", ["--fast"], "unknown argument '--fast'; legal are --out"),
                                 ("memory", ["--headers", "/no/such"], "--headers is /no/such, which is no folder")):
            done = self.run_script(only, *more)
            self.assertEqual(done.returncode, 2)
            self.assertIn(text, done.stderr)
        for arguments, text in ((["--fast"], "--fast is unknown"), (["--only"], "--only needs a value"),
                                (["--tokens", "no"], "--tokens is no, must be a whole number")):
            done = subprocess.run([PROGRAMS / "dry_cuda_memory", *arguments], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertIn(text, done.stderr)

    def test_rows_before_a_failure_are_kept(self) -> None:
        with self.standing_in("step", """#!/bin/sh
echo "$*" >>'%s'
echo '{"id": "step.4096.mfu", "value": 0.5}'
echo 'no times of kernels' >&2
exit 1
""" % (self.home / "calls")):
            done = self.run_script("step-4096")
            after = (self.home / "out/step-4096.jsonl").read_text()
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED step-4096: exit code 1", done.stdout)
        self.assertEqual(json.loads(after)["value"], 0.5)
        self.assertNotIn("--tokens", (self.home / "calls").read_text())

    def test_an_archive_and_a_short_table(self) -> None:
        done = self.run_script("collective", "--short", "--archive", self.home / "logs.tgz")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("| copy by a kernel |", done.stdout)  # of the run before
        self.assertNotIn("Kernels of", done.stdout)
        with tarfile.open(self.home / "logs.tgz") as archive:
            names = archive.getnames()
        for name in ("out/collective.log", "out/collective.jsonl", "out/table.md"):
            self.assertIn(name, names)

    def test_every_test_is_named_with_its_end(self) -> None:
        folder = self.home / "build/tests"
        folder.mkdir()
        try:
            for name, text in (("launch", "echo '[doctest] test cases: 3 | 3 passed'"), ("attention", "echo none; exit 77"),
                               ("zebra", "echo 'a.cpp:1:'; echo 'TEST CASE:  stripes'; exit 1"), ("memory", "exit 0"),
                               ("two", "case $1 in --list*) echo 'filename=\"x/llama.cpp\"'; echo 'filename=\"x/one.cu\"' ;;"
                                " *) echo \"[doctest] test cases: $1\" ;; esac")):
                script(folder / f"cuda_{name}", f"#!/bin/sh\n{text}\n")
            done = self.run_script("tests")
        finally:
            shutil.rmtree(folder)
        self.assertEqual(done.returncode, 1)
        lines = [re.sub(r", \d+ s", "", line) for line in done.stdout.splitlines()]
        expected_lines = ["passed launch: [doctest] test cases: 3 | 3 passed", "skipped attention: none",
                          "passed one: [doctest] test cases: --source-file=*/one.cu", "FAILED zebra: exit code 1",
                          "passed llama: [doctest] test cases: --source-file=*/llama.cpp", "passed memory: "]
        self.assertEqual([line for line in lines if line in expected_lines], expected_lines)
        self.assertIn("stripes", (self.home / "out/test-zebra.log").read_text())

    def test_sanitizers_name_the_program(self) -> None:
        sanitize = ["sh", HERE.parents[1] / "tests/cuda/sanitize.sh", self.home / "tests"]
        path = {"PATH": f"{self.home}/bin:{os.environ['PATH']}", "CUDA_PATH": "/no/such"}
        (self.home / "tests").mkdir()
        script(self.home / "bin/compute-sanitizer", "#!/bin/sh\necho $2 $5\ncase $2$5 in racecheck*bad) exit 99; esac\n")
        done = subprocess.run(sanitize, capture_output=True, text=True, env=dict(os.environ, **path))
        self.assertEqual((done.returncode, done.stdout.split(":")[0]), (1, "FAILED"))  # no programs
        for program in ("cuda_good", "cuda_bad", "cuda_llama"):
            script(self.home / "tests" / program, "#!/bin/sh\nexit 3\n")
        done = subprocess.run(sanitize, capture_output=True, text=True, env=dict(os.environ, **path))
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED racecheck on cuda_bad:\nracecheck ", done.stdout)
        self.assertEqual(done.stdout.count("ok "), 3)
        self.assertNotIn("llama", done.stdout)
        done = subprocess.run([*sanitize, "memcheck"], capture_output=True, text=True, env=dict(os.environ, **path))
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_prefix_chooses_rows(self) -> None:
        done = subprocess.run([PROGRAMS / "dry_cuda_memory", "--tiny", "--only", "memory.swiglu"], capture_output=True,
                              text=True)
        ids = [json.loads(line)["id"] for line in done.stdout.splitlines()]
        self.assertEqual(ids, ["copy.kernel", "copy.memcpy", "memory.swiglu_forward", "memory.swiglu_backward"])


class Table(unittest.TestCase):
    """Tests the table of results that this test writes."""

    def line(self, lines: list[str], what: str) -> list[str]:
        found = [line for line in lines if line.startswith(f"| {what} |")]
        self.assertEqual(len(found), 1, what)
        return [cell.strip() for cell in found[0].split("|")[1:-1]]

    def test_met_not_met_and_missing(self) -> None:
        lines = table.table([{"id": "memory.swiglu_forward", "value": 0.85, "terabytes_per_second": 2.5,
                              "known": "3 TB/s", "seconds": 0.0004, "step_calls": 192},
                             {"id": "step.2048.tokens_per_second", "value": 65536, "seconds": 2.0},
                             {"id": "memory.adamw", "value": 0.8499},
                             {"id": "step.2048.over_kernels", "value": 1.05, "method": "CUPTI"},
                             {"id": "step.4096.over_kernels", "value": 1.06},
                             {"id": "copy.kernel", "value": 3.012, "terabytes_per_second": 3.012}])
        self.assertEqual(self.line(lines, "SwiGLU, forward"),
                         ["SwiGLU, forward", "0.85 of a copy (2.50 TB/s)", "3 TB/s", "at least 0.85", "yes", "3.8 %"])
        self.assertEqual(self.line(lines, "AdamW over 54 tensors")[4], "NO")
        self.assertEqual(self.line(lines, "step at 2048: time over its kernels'")[1:],
                         ["1.05 (by CUPTI)", "", "at most 1.05", "yes", ""])
        self.assertEqual(self.line(lines, "step at 4096: time over its kernels'")[4], "NO")
        self.assertEqual(self.line(lines, "copy by a kernel"), ["copy by a kernel", "3.01 TB/s", "", "", "", ""])
        self.assertEqual(self.line(lines, "SwiGLU, backward"),
                         ["SwiGLU, backward", "", "", "at least 0.85", "MISSING", ""])
        self.assertFalse(any("cuDNN" in line for line in lines))
        wanted = sum(not row.optional for row in rows.rows())
        self.assertEqual(lines[-1], f"2 targets met, 2 not met, {wanted - 6} rows missing.")

    def test_the_ratio_takes_the_faster_of_our_two_ways(self) -> None:
        both = [{"id": "step.2048.tokens_per_second", "value": 40000},
                {"id": "step.2048.launched.tokens_per_second", "value": 46000},
                {"id": "pytorch.2048.tokens_per_second", "value": 40000}]
        self.assertEqual(self.line(table.table(both), "step at 2048 against PyTorch's")[1:],
                         ["1.15 times", "40000 tokens/s", "at least 1.2", "NO", ""])
        both.append({"id": "step.2048.measured.any.tokens_per_second", "value": 48000})
        self.assertEqual(self.line(table.table(both), "step at 2048 against PyTorch's")[1:],
                         ["1.20 times", "40000 tokens/s", "at least 1.2", "yes", ""])
        self.assertEqual(self.line(table.table(both[:2]), "step at 2048 against PyTorch's")[4], "MISSING")

    def test_attention_counts_as_the_step_calls_it(self) -> None:
        both = [{"id": "attention.own.4096.forward", "value": 200, "seconds": 0.002, "step_calls": 192},
                {"id": "attention.cudnn.4096.forward", "value": 360, "seconds": 0.001, "step_calls": 192},
                {"id": "pytorch.attention.4096.forward", "value": 400},
                {"id": "step.4096.tokens_per_second", "value": 1, "seconds": 2.0}]
        self.assertEqual(self.line(table.table(both), "attention, forward, 4096, against PyTorch's")[1:],
                         ["0.90 times (360 TFLOP/s)", "400 TFLOP/s", "at least 1", "NO", "9.6 %"])

    def test_the_short_table_is_short(self) -> None:
        everything = [{"id": row.id, "value": 12345.678} for row in rows.rows()]
        lines = table.short_table(everything)
        self.assertLessEqual(len("\n".join(lines)), table.SHORT)
        self.assertIn("missing: nothing.", lines[-1])
        self.assertIn("missing: 2 of copy, 20 of memory", table.short_table([])[-1])

    def test_two_ways_are_told_with_their_times(self) -> None:
        lines = table.table([{"id": "choice.residual_norm", "value": 1.25, "seconds": 4e-5, "other_seconds": 5e-5,
                              "step_calls": 0, "other": "a sum, then a norm"},
                             {"id": "step.2048.tokens_per_second", "value": 1, "seconds": 2.0}])
        self.assertEqual(self.line(lines, "a residual sum within the next norm")[1:],
                         ["1.25 times as fast (40 us)", "50 us, a sum, then a norm", "at least 1.1", "yes", "not in it"])

    def test_only_and_optional_rows(self) -> None:
        lines = table.table([{"id": "attention.cudnn.2048.forward", "value": 351.2}], "attention.")
        self.assertEqual(self.line(lines, "cuDNN's attention, forward, 2048")[1], "351 TFLOP/s")
        self.assertEqual(lines[-1], "0 targets met, 0 not met, 9 rows missing.")

    def test_kernels_of_a_step(self) -> None:
        lines = table.kernels([{"id": "step.2048.one_kernel", "value": 0.0125, "count": 24, "share": 0.25, "name": "f"}])
        self.assertIn("| `f` | 12.50 | 24 | 0.250 |", lines)

    def test_parts_of_a_step(self) -> None:
        shares = {"void plait::kernels::detail::attention_forward_mma<64>(...)": 0.25, "nvjet_hsh_128x256_64x4_1x2_h_bz": 0.25,
                  "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": 0.125, "row_map_kernel<8, swiglu_rows<bf16>>": 0.125,
                  "who_knows": 0.0625}
        lines = table.parts([{"id": "step.2048.one_kernel", "value": 0.01, "count": 1, "share": share, "name": name}
                             for name, share in shares.items()])
        for part, share in (("attention", 0.375), ("products", 0.25), ("SwiGLU", 0.125), ("the rest", 0.25), ("norms", 0)):
            self.assertIn(f"| {part} | {share:.3f} |", lines)

    def test_what_is_no_result_is_an_error(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "a.jsonl")
            for text in ("hello", "{}", '{"id": 1, "value": 2}', '{"id": "a", "value": "b"}'):
                file.write_text('{"id": "copy.kernel", "value": 1}\n' + text + "\n")
                with self.assertRaisesRegex(SystemExit, "a.jsonl:2: no result"):
                    table.read([str(file)])


class Code(unittest.TestCase):
    @unittest.skipUnless(NVCC, "there is no nvcc")
    def test_vectors_are_stored_by_one_instruction(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, code = pathlib.Path(folder, "kernels.cu"), pathlib.Path(folder, "kernels.ptx")
            source.write_text(VECTOR_KERNELS)
            subprocess.run([NVCC, "-std=c++20", "-arch=compute_90", "-ptx",
                            f"-I{HERE.parents[1] / 'include'}", source, "-o", code], check=True)
            kernels = re.findall(r"\.entry (\w+)\((.*?)\n}\n", code.read_text(), re.DOTALL)
        vectors = [(name, text) for name, text in kernels if "kernelILi8E" in name and "column_sums" not in name]
        self.assertEqual(len(vectors), 10)  # eight of the norms: forward and backward, centred or not, an addend or none
        for name, text in vectors:
            self.assertIn("st.global.v4.b32", text, name)
            self.assertNotRegex(text, r"st\.global\.(v2\.|v4\.)?[ub]16", name)


class Expected(unittest.TestCase):
    def test_the_page_is_what_is_derived(self) -> None:
        page = (HERE.parent / "results/expected-h100.md").read_text()
        self.assertEqual(page, "\n".join(expected.page(expected.Shape())) + "\n",
                         "make it anew: python3 benchmarks/cuda/expected.py > benchmarks/results/expected-h100.md")

    def test_the_shape_is_the_model_s(self) -> None:
        self.assertEqual(expected.Shape().parameters(), 1711376384)
        self.assertEqual(TINY.parameters(), 96 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64)


if __name__ == "__main__":
    PROGRAMS = pathlib.Path(sys.argv.pop(1))
    unittest.main()
