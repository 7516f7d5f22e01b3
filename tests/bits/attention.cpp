// Same bits: the table of angles, QK-norm in both layouts, gated attention, and all their gradients.
#include <attention/attention_case.hpp>
#include <keel/attention/qk_norm.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <support/bits.hpp>

using namespace keel_test;

int main() {
    for (data_kind kind :
         {data_kind::normal, data_kind::with_nan, data_kind::huge, data_kind::subnormal, data_kind::outlier})
        for (keel::rope_layout layout : {keel::rope_layout::half_pairs, keel::rope_layout::interleaved_pairs})
            same_bits(std::string("qk_norm ") + name_of(kind) +
                          (layout == keel::rope_layout::half_pairs ? " half" : " interleaved"),
                      [&](auto const& be, digest& d) {
                          int64_t const tokens = 66, heads = 3, head_dim = 45, half = 17, width = heads * head_dim;
                          guarded_matrix<keel::bf16> x(tokens, width, 1, floats(kind, tokens * width, 1)),
                              y(tokens, width), dx(tokens, width);
                          guarded_matrix<keel::bf16> dy(tokens, width, 0, floats(data_kind::normal, tokens * width, 2));
                          guarded_matrix<float> delta(1, head_dim, 0, floats(data_kind::uniform, head_dim, 3)),
                              ddelta(1, head_dim);
                          guarded_matrix<float> cosine(tokens, half), sine(tokens, half, 1), rrms(tokens, heads);
                          guarded_matrix<float> frequencies(1, half, 0, floats(data_kind::uniform, half, 4));
                          std::vector<int32_t> positions;
                          for (int32_t t = 0; t < tokens; ++t) positions.push_back(t * t * 1000);
                          keel::rope_table(be, keel::vec(positions.data(), tokens),
                                           keel::view<float const, 1>(frequencies.vec()), cosine.view(), sine.view())
                              .or_throw();
                          keel::rope_angles const angles{cosine.view(), sine.view()};
                          scratch ws(keel::qk_norm_backward_workspace(tokens, heads, head_dim));
                          keel::qk_norm(be, heads_of(x, heads, head_dim), delta.vec(), angles,
                                        heads_of(y, heads, head_dim), {.rrms = rrms.view()}, {.layout = layout})
                              .or_throw();
                          keel::qk_norm_backward(be, heads_of(dy, heads, head_dim), heads_of(x, heads, head_dim),
                                                 delta.vec(), angles, {.rrms = rrms.view()},
                                                 {.dx = heads_of(dx, heads, head_dim), .ddelta = ddelta.vec()},
                                                 {.layout = layout}, ws.get())
                              .or_throw();
                          d.add(cosine), d.add(sine), d.add(y), d.add(rrms), d.add(dx), d.add(ddelta);
                      });
    attention_setup const setups[] = {
        {.lengths = {70, 0, 9}, .heads = 3, .kv_heads = 1, .head_dim = 20, .gate_dim = 20},
        {.lengths = {530}, .heads = 1, .kv_heads = 1, .head_dim = 7, .gate_dim = 1},
        {.lengths = {33, 33}, .heads = 4, .kv_heads = 2, .head_dim = 16, .kind = data_kind::with_nan},
        {.lengths = {66}, .heads = 2, .kv_heads = 2, .head_dim = 5, .gate_dim = 5, .kind = data_kind::outlier},
    };
    for (attention_setup const& s : setups)
        same_bits(std::string("gated_attention ") + name_of(s.kind) + " " + std::to_string(s.lengths[0]) + "x" +
                      std::to_string(s.heads) + "x" + std::to_string(s.head_dim),
                  [&](auto const& be, digest& d) {
                      uint64_t const narrow = attention_result<keel::bf16>(s, be),
                                     wide = attention_result<float>(s, be);
                      d.add(&narrow, sizeof narrow), d.add(&wide, sizeof wide);
                  });
    return disagreements != 0;
}
