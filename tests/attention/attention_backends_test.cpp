// gated_attention on every CPU backend that this translation unit's flags allow, bit for bit with the reference.
#include <attention/attention_case.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;

TEST_CASE("gated_attention has the same bits on every architecture and thread count") {
    attention_setup const s{.lengths = {70, 1, 530}, .heads = 3, .kv_heads = 1, .head_dim = 20, .gate_dim = 20};
    auto const expected = attention_result<keel::bf16>(s, keel::reference{});
    CHECK(expected != 0);
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        CHECK(attention_result<keel::bf16>(s, be) == expected);
    });
}
