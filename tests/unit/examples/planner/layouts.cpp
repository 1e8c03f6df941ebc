// program: plan
#include <doctest/doctest.h>

#include <string>

#include "cases.hpp"
#include "support/texts.hpp"

namespace {

pp::training_job job_of(std::int64_t batch, std::int64_t seq = 8192) { return llama_job("llama-3-405b", batch, seq); }

std::string why(const char* text, std::int64_t batch = 512, std::int64_t seq = 8192) {
  return pp::why_illegal(layout_of(text), job_of(batch, seq));
}

std::string refusal(const char* text) {
  return plait::test::text_thrown_by([&] { pp::parse_layout(text, "--layout"); });
}

}  // namespace

TEST_CASE("a layout's text is read unchanged") {
  for (const char* text : {"tp=8,cp=2,pp=8,dp=8,microbatch=1,schedule=interleaved:8,recompute=none,zero=1",
                           "tp=1,cp=1,pp=1,dp=64,microbatch=2,recompute=full,zero=3",
                           "tp=4,cp=1,pp=2,dp=8,microbatch=1,schedule=zb_v,"
                           "recompute=selective,zero=2,sequence_parallel=0,context=ulysses,order=tp-cp-pp-dp",
                           "tp=1,cp=1,pp=2,dp=1,microbatch=1,schedule=1f1b,recompute=every:3,zero=0",
                           "tp=1,cp=2,pp=1,dp=4,microbatch=1,recompute=none,zero=1,replicate=cp",
                           "tp=1,cp=2,pp=1,dp=4,microbatch=1,recompute=none,zero=2,replicate=dp",
                           "tp=1,cp=1,pp=1,dp=16,microbatch=1,recompute=none,zero=3,replicate=dp:4",
                           "tp=1,cp=1,pp=1,dp=2,microbatch=1,recompute=none,zero=1,offload=optimizer",
                           "tp=1,cp=1,pp=1,dp=2,microbatch=1,recompute=none,zero=1,offload=activations",
                           "tp=1,cp=1,pp=1,dp=2,microbatch=1,recompute=full,zero=1,offload=both,loss_chunks=8"}) {
    CAPTURE(text);
    const pp::training_layout l = pp::parse_layout(text, "x");
    CHECK(pp::layout_text(l) == text);
    CHECK(pp::parse_layout(pp::layout_text(l), "x") == l);
  }
  CHECK(pp::parse_layout("schedule=zb_v,pp=2", "x").chunks == 2);
  CHECK(pp::parse_layout(" tp=2 , pp=4 ", "x") == pp::parse_layout("tp=2,pp=4", "x"));
}

TEST_CASE("a text that is not a layout is refused by its key") {
  CHECK(refusal("tp=0") == "--layout: tp: '0' is not a whole number from 1 on");
  CHECK(refusal("tp=8x") == "--layout: tp: '8x' is not a whole number from 1 on");
  CHECK(refusal("tp=8,tp=4") == "--layout: tp is given twice");
  CHECK(refusal("tp=8 pp=2") ==
        "--layout: 'tp=8 pp=2' has a space in it; keys are separated by commas, as in tp=8,pp=2");
  CHECK(refusal("tensor=8").starts_with("--layout: unknown key 'tensor'; legal are tp, cp, pp, dp, "));
  CHECK(refusal("tp").starts_with("--layout: 'tp' is not key=value, as in tp=8; keys are tp, "));
  CHECK(refusal("schedule=gpip") ==
        "--layout: schedule: unknown value 'gpip'; legal are gpipe, 1f1b, interleaved:V, zb_h1, zb_h2, zb_v and "
        "automatic");
  CHECK(refusal("schedule=interleaved")
            .starts_with("--layout: schedule: the chunks of interleaved, as in interleaved:2: '' is not a whole number "
                         "from 2 on"));
  CHECK(refusal("schedule=zb_v:2") ==
        "--layout: schedule: 'zb_v:2': only interleaved has a number of chunks to choose");
  CHECK(refusal("recompute=some") ==
        "--layout: recompute: unknown value 'some'; legal are none, selective, full and every:K");
  for (const char* field : {"--zero", "rows.csv line 2: zero"})  // named once
    CHECK_THROWS_WITH_AS(
        [&] {
          pp::training_layout l;
          pp::set_layout_key(l, "zero", "4", field);
        }(),
        (std::string(field) + ": unknown value '4'; legal are 0, 1, 2 and 3").c_str(), plait::error);
  CHECK(refusal("zero=4") == "--layout: zero: unknown value '4'; legal are 0, 1, 2 and 3");
  CHECK(refusal("replicate=tp") == "--layout: replicate: unknown value 'tp'; legal are none, dp, cp and dp:R");
  CHECK(refusal("replicate=dp:1") ==
        "--layout: replicate: the copies along dp, as in dp:4: '1' is not a whole number from 2 on");
  CHECK(refusal("offload=all") ==
        "--layout: offload: unknown value 'all'; legal are none, optimizer, activations and both");
  CHECK(refusal("order=dp-tp") == "--layout: order: unknown value 'dp-tp'; legal are tp-cp-dp-pp and tp-cp-pp-dp");
}

TEST_CASE("some counts may end in a unit") {
  CHECK(pp::parse_count("16M", "x", 1, true) == std::int64_t{16} << 20);
  CHECK(pp::parse_count("4K", "x", 1, true) == 4096);
  CHECK(pp::parse_count("17", "x") == 17);
  CHECK_THROWS_WITH_AS(pp::parse_count("16M", "--batch"), "--batch: '16M' is not a whole number from 1 on",
                       plait::error);
  CHECK_THROWS_AS(pp::parse_count("9999999999999G", "x", 1, true), plait::error);
  CHECK_THROWS_AS(pp::parse_count("-4", "x"), plait::error);
  CHECK_THROWS_AS(pp::parse_count("", "x"), plait::error);
}

TEST_CASE("a layout that cannot train a job is refused by field, with the nearest valid values") {
  CHECK(why("tp=8,cp=2,pp=8,dp=8,schedule=interleaved:8").empty());
  CHECK(why("tp=3") == "tp is 3 and the model has 128 heads, which it must divide; the nearest are 2 and 4");
  CHECK(why("tp=8,dp=24") ==
        "batch is 512 sequences and dp 24 ranks take microbatches of 1; the nearest legal batches are 504 and 528");
  CHECK(why("tp=8,dp=1024") ==
        "batch is 512 sequences and dp 1024 ranks take microbatches of 1; the nearest legal batches are 1024");
  CHECK(why("tp=8,pp=127") == "pp is 127 with 1 chunks on a rank: 127 stages for 126 layers; use at most 126 stages");
  CHECK(
      why("tp=8,pp=8,dp=32,schedule=interleaved:2", 320) ==
      "interleaved needs microbatches in multiples of pp = 8 and a rank has 10; the nearest legal batches are 256 and "
      "512");
  CHECK(why("tp=8,cp=3", 512, 8192) ==
        "seq is 8192 and is cut into 48 pieces by cp = 3 and tp = 8; the nearest legal are 8160 and 8208");
  CHECK(why("tp=8,pp=2,zero=3") ==
        "zero is 3 and pp above 1: every microbatch would gather the parameters again; use zero 1 or 2, or pp = 1");
  CHECK(why("pp=1,schedule=interleaved:2") ==
        "pp is 1 with 2 chunks on a rank; without a pipeline a rank has one chunk");
  CHECK(why("tp=16,cp=16,context=ulysses") ==
        "cp is 16 and a rank has 8 heads, which ulysses divides over ranks; the nearest are 8");
  CHECK(why("tp=8,dp=8,zero=0,replicate=dp") ==
        "replicate is dp and zero 0, which cuts nothing; legal are zero 1 to 3, and replicate none");
  CHECK(why("tp=8,dp=8,replicate=cp") == "replicate is cp, an axis of one rank; legal is none");
  CHECK(why("tp=8,dp=8,replicate=dp:3") == "replicate is dp:3 and dp 8, which it must divide; the nearest are 2 and 4");
  CHECK(why("tp=8,dp=8,replicate=dp") ==
        "replicate is dp, and with dp = 8 and cp = 1 there is one rank left to cut over; legal is none, with zero 0");
  CHECK(why("tp=8,cp=2,dp=8,replicate=dp").empty());
  pp::training_job sparse = job_of(512);
  sparse.model.experts = 8, sparse.model.chosen = 2;
  CHECK(pp::why_illegal(layout_of("cp=2,dp=8,replicate=dp"), sparse) ==
        "replicate is dp in a model of experts, whose hybrids are not priced; legal is none");
  CHECK(why("dp=16777216,microbatch=1099511627776") ==
        "microbatch is 1099511627776 sequences on each of 16777216 ranks of dp, and the batch has 512; use at most 1");
  CHECK(why("tp=8,cp=1048576,pp=1,dp=1048576") ==
        "tp, cp, pp and dp together are more than 1000000000 ranks, which is more than anybody has");
  CHECK(why("tp=2,cp=8,context=ulysses", 512, 8192).empty());
  CHECK(why("tp=2,cp=8,loss_chunks=512", 512, 8192).empty());
  CHECK(why("tp=2,cp=8,loss_chunks=513", 512, 8192) ==
        "loss_chunks is 513 and a rank has 512 positions of a sequence; legal is at most as many");
  CHECK(why("tp=8,pp=2,schedule=zb_v,loss_chunks=2") ==
        "loss_chunks is 2 and the schedule zb_v defers weight gradients, for which the gradients of all logits wait; "
        "legal is 1, or gpipe, 1f1b or interleaved");
  pp::training_job other = job_of(8);
  other.program = pp::software_called("megatron", "x");
  CHECK(pp::why_illegal(layout_of("tp=8,loss_chunks=2"), other) ==
        "loss_chunks is 2 and the program megatron; legal is 1, and more for the program plait");
  pp::training_job thirds = job_of(8, 6144);
  thirds.model.heads = 24;
  CHECK(pp::why_illegal(layout_of("cp=3,context=ulysses"), thirds) ==
        "cp is 3 and a rank has 8 heads of keys, which ulysses divides over ranks; one must divide the other");
  pp::training_job odd = job_of(8);
  odd.model.heads = 96, odd.model.kv_heads = 12, odd.model.ffn = 96 * 512;
  CHECK(
      pp::why_illegal(layout_of("tp=8"), odd) ==
      "tp is 8 and the model has 12 heads of keys; one must divide the other, so that each is on one rank or whole on "
      "several");
}

TEST_CASE("a hybrid shards pieces over the ranks without copies, which are part of dp") {
  const auto place = [](const pp::axis_place& a) {
    return std::to_string(a.extent) + " at " + std::to_string(a.stride);
  };
  const struct {
    const char* text;
    std::int64_t pieces;
    const char *cut_cp, *cut_dp, *copies;
  } cases[] = {{"tp=2,cp=4,dp=8", 32, "4 at 2", "8 at 8", "1 at 64"},
               {"tp=2,cp=4,dp=8,replicate=dp", 4, "4 at 2", "1 at 8", "8 at 8"},
               {"tp=2,cp=4,dp=8,replicate=cp", 8, "1 at 2", "8 at 8", "4 at 2"},
               {"tp=2,cp=4,dp=8,replicate=dp:4", 8, "4 at 2", "2 at 8", "4 at 16"},
               {"tp=2,pp=3,dp=8,replicate=dp:4,order=tp-cp-pp-dp", 2, "1 at 2", "2 at 6", "4 at 12"}};
  for (const auto& c : cases) {
    CAPTURE(std::string(c.text));
    const pp::training_layout l = layout_of(c.text);
    CHECK(l.pieces() == c.pieces);
    CHECK(place(l.cut_cp_axis()) == c.cut_cp);
    CHECK(place(l.cut_dp_axis()) == c.cut_dp);
    CHECK(place(l.copies_axis()) == c.copies);
  }
}
