// program: files
#include "plait/layout/parse.hpp"

#include <doctest/doctest.h>

using namespace plait;

namespace {

struct expert_ranks : axis_tag<"experts"> {};
using trainer_mesh = mesh<axis<dp>, axis<cp, 2>, axis<tp>>;

/// `message` comes after the text of the mesh.
void refuses(std::string_view text, const std::string& message, std::int64_t ranks = -1) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS(parse_mesh<trainer_mesh>(text, ranks), cat({"mesh ", text, ": ", message}).c_str(), error);
}

}  // namespace

TEST_CASE("the axes have the mesh's order, with those that the text leaves out") {
  const mesh_shape shape = parse_mesh<trainer_mesh>("tp=4,dp=2", 16);
  CHECK(shape.axes == trainer_mesh::axes);
  CHECK(shape.extent(axis_of<dp>) == 2);
  CHECK(shape.extent(axis_of<cp>) == 2);
  CHECK(shape.extent(axis_of<tp>) == 4);
  CHECK(parse_mesh<trainer_mesh>("").size() == 2);
  CHECK(parse_mesh<trainer_mesh>(" tp = 3 , cp=2 ", 6).extent(axis_of<tp>) == 3);
}

TEST_CASE("a user's own axis and an axis-free mesh") {
  CHECK(parse_mesh<mesh<axis<expert_ranks>>>("experts=8", 8).extent(axis_of<expert_ranks>) == 8);
  CHECK(parse_mesh<mesh<>>("", 1).size() == 1);
  CHECK_THROWS_AS(parse_mesh<mesh<>>("dp=1", 1), error);
}

TEST_CASE("a negative number of ranks is not compared") { CHECK(parse_mesh<trainer_mesh>("tp=5", -1).size() == 10); }

TEST_CASE("errors name the option, the value and the valid values") {
  refuses("tp=4,xx=2", "unknown axis \"xx\"; the axes of this mesh are dp, cp=2 (fixed), tp");
  for (const std::string item : {"2", "xx", "tp2", "tp:2"})
    refuses(item,
            "\"" + item +
                "\" names no axis; legal is a list of AXIS=EXTENT, as in dp=2,tp=4, of the axes dp, cp=2 (fixed), "
                "tp");
  refuses("tp=2 dp=2", "\"tp=2 dp=2\" has a space in it; axes are separated by commas, as in dp=2,tp=4");
  refuses("tp=4,tp=2", "axis \"tp\" is given twice");
  for (const std::string item : {"tp=0", "tp=-1", "tp=", "tp", "tp=2x", "tp=2.5", "tp=0x4"})
    refuses(item, "\"" + item + "\" is not AXIS=EXTENT with a positive whole number, as in tp=4");
  refuses("cp=4", "axis \"cp\" has the fixed extent 2, not 4");
  refuses("tp=4,dp=2", "the extents dp=2 * cp=2 * tp=4 multiply to 16 ranks, and there are 8", 8);
  refuses("tp=99999999999999999999",
          "\"tp=99999999999999999999\" has an extent beyond the number of ranks of any machine");
  refuses("tp=4000000,dp=4000000", "the extents multiply to more than 2147483648 ranks");
  for (const char* text : {",", "tp=2,", "tp=2,,dp=2", ",tp=2"})
    refuses(text, "a comma without an axis next to it; legal is a list like dp=2,tp=4");
}
