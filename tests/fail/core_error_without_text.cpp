// expect: an error has no text
// errors-at-most: 1
#include "plait/core/error.hpp"

enum class my_error { ok, forgotten };

template <>
inline constexpr const char* plait::error_text<my_error::ok> = "ok";
#ifdef PLAIT_FAIL_FIX
template <>
inline constexpr const char* plait::error_text<my_error::forgotten> = "what was forgotten";
#endif

const char* const text = plait::detail::error_texts<my_error, my_error::ok, my_error::forgotten>[1];
