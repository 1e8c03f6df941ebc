#!/bin/sh
# The example of pipeline schedules prints, draws and traces the schedules as documented.
# timeout: 60
. "$(dirname "$0")/lib/base.sh"
cd "$work"

"$BIN/pipeline_schedule" >out.txt || fail "pipeline_schedule"
for line in '^1f1b .* 28.6% ' '^zb_v .* 4 ' 'rank 3, (B7.0): a backward is missing' '^global_list *ok' \
  '^  send activation 1: stage 0 -> 1' '^0F0,0F1,0B0,0F2,0B1,0B2$'; do
  grep -q "$line" out.txt || fail "the output lacks '$line': $(cat out.txt)"
done
python3 - <<'PYTHON' || fail "the files"
import json, xml.etree.ElementTree as tree
events = json.load(open("pipeline.json"))["traceEvents"]
spans = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
assert len(spans) == 4 * 16
ends = {e["id"]: e for e in events if e["ph"] == "f"}
starts = [e for e in events if e["ph"] == "s"]
assert len(starts) == len(ends) == 48
for start in starts:  # an arrow leads from inside an event to the start of a later one on another rank
    end = ends[start["id"]]
    assert (end["pid"], end["tid"], end["ts"]) in spans and end["pid"] != start["pid"] and end["ts"] > start["ts"]
    assert any(e["ts"] <= start["ts"] <= e["ts"] + e["dur"] for e in spans.values() if e["pid"] == start["pid"])
titles = [t.text for t in tree.parse("pipeline.svg").getroot().iter("{http://www.w3.org/2000/svg}title")]
assert sum(t.startswith("F") for t in titles) == 32 * 5 + 64 * 5, len(titles)
PYTHON
! "$BIN/pipeline_schedule" 4 6 interleaved:2 2>errors.txt || fail "6 microbatches on 4 ranks are not a schedule"
grep -q 'the nearest legal numbers of microbatches are 4 and 8' errors.txt || fail "the message: $(cat errors.txt)"
