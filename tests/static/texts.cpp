// The types that can be parts of a text. A bool is refused: as a letter or a number its meaning would be unclear.
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "plait/core/text.hpp"

using plait::text_piece;

static_assert(std::constructible_from<text_piece, const char*> && std::constructible_from<text_piece, std::string>);
static_assert(std::constructible_from<text_piece, std::string_view> && std::constructible_from<text_piece, char>);
static_assert(std::constructible_from<text_piece, std::int8_t> && std::constructible_from<text_piece, std::uint64_t>);
static_assert(std::constructible_from<text_piece, float> && std::constructible_from<text_piece, double>);
static_assert(!std::constructible_from<text_piece, bool> && !std::constructible_from<text_piece, void*>);
