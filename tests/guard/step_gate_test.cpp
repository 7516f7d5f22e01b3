// The step gate: one norm and one decision for the whole model, the same bits everywhere.
#include <cmath>
#include <limits>

#include <keel/guard/peak_magnitude.hpp>
#include <keel/guard/step_gate.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

template <class B> keel::step_gate gate_of(B const& be, std::vector<keel::gradient_tensor> const& list, float max_norm = infinity) {
    auto const tensors = keel::vec(list.data(), static_cast<int64_t>(list.size()));
    scratch memory(keel::make_gate_workspace(tensors));
    keel::step_gate gate;
    keel::make_gate(be, tensors, {.max_norm = max_norm}, &gate, memory.get()).or_throw();
    return gate;
}
/// Of the fields, not of the padding between them.
bool same(keel::step_gate const& a, keel::step_gate const& b) {
    return a.apply == b.apply && std::bit_cast<uint32_t>(a.clip) == std::bit_cast<uint32_t>(b.clip) &&
           std::bit_cast<uint64_t>(a.pre_clip_norm) == std::bit_cast<uint64_t>(b.pre_clip_norm) && a.nan == b.nan && a.inf == b.inf &&
           a.first_non_finite == b.first_non_finite;
}
template <class T> long double squares(std::vector<T> const& x) {
    long double s = 0;
    for (T v : x) s += static_cast<long double>(to_double(v)) * static_cast<long double>(to_double(v));
    return s;
}
std::vector<keel::bf16> as_bf16(std::vector<float> const& x) {
    std::vector<keel::bf16> out;
    for (float v : x) out.push_back(to_format<keel::bf16>(v));
    return out;
}
template <class T> keel::gradient_tensor tensor(std::vector<T> const& x) {
    return keel::vec(x.data(), static_cast<int64_t>(x.size()));
}

/// fp32 chunk sums: chains of 16 fma, a tree of 7 and 4 segments give at most 27 * 2^-24 relative, halved by the root.
constexpr double norm_tolerance = 14 * 0x1p-24;

} // namespace

TEST_CASE("the gate's norm is that of all gradients together, on every backend") {
    for (data_kind kind : {data_kind::normal, data_kind::huge, data_kind::tiny, data_kind::subnormal, data_kind::mixed_scales,
                           data_kind::outlier, data_kind::zeros})
        for (int64_t n : {1, 15, 127, 8191, 8192, 8193, 50000}) {
            INFO(name_of(kind) << " " << n);
            auto const a = floats(kind, n, 1), b = floats(data_kind::normal, 77, 2);
            auto const c = as_bf16(floats(kind, n / 2 + 1, 3));
            std::vector<keel::gradient_tensor> const list = {tensor(a), keel::view<float, 2>{}, tensor(b), tensor(c)};
            auto const gate = gate_of(keel::reference{}, list, 1.0f);
            auto const want = static_cast<double>(std::sqrt(squares(a) + squares(b) + squares(c)));
            CHECK(std::abs(gate.pre_clip_norm - want) <= want * norm_tolerance);
            double const factor = gate.pre_clip_norm <= 1 ? 1.0 : 1 / gate.pre_clip_norm;
            CHECK(gate.apply == (factor >= 0x1p-126 ? 1 : 0));
            CHECK(gate.clip == (gate.apply == 1 ? static_cast<float>(factor) : 0.0f));
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                CHECK(same(gate_of(be, list, 1.0f), gate));
            });
        }
}

TEST_CASE("squares neither overflow nor vanish") { // fairscale #263, EO #238
    for (float v : {1e30f, 3e38f, 1e-30f, 1e-45f}) {
        std::vector<float> const x(10000, v);
        auto const gate = gate_of(keel::cpu{}, {tensor(x)});
        CHECK(gate.pre_clip_norm == Approx(100 * static_cast<double>(v)).epsilon(norm_tolerance));
        CHECK(gate.apply == 1);
        CHECK(gate.clip == 1.0f);
    }
    std::vector<float> const both = {1e30f, 1e-30f, -1e30f};
    CHECK(gate_of(keel::cpu{}, {tensor(both)}, 1.0f).pre_clip_norm == Approx(std::sqrt(2.0) * 1e30).epsilon(1e-6));
    // A tensor of tiny gradients beside none: what is small is not lost against the chunk's scale, only against the sum.
    std::vector<float> const small(3, 2e-30f), large(1, 1e30f);
    CHECK(gate_of(keel::cpu{}, {tensor(small)}).pre_clip_norm == Approx(std::sqrt(12.0) * 1e-30).epsilon(1e-6));
    CHECK(gate_of(keel::cpu{}, {tensor(small), tensor(large)}).pre_clip_norm == Approx(1e30).epsilon(1e-6));
}

TEST_CASE("a norm within the limit clips by exactly 1, the first above it by less") {
    std::vector<float> const x = {3.0f, 4.0f};
    CHECK(gate_of(keel::cpu{}, {tensor(x)}, 5.0f).clip == 1.0f); // equal counts as within
    CHECK(gate_of(keel::cpu{}, {tensor(x)}, infinity).clip == 1.0f);
    CHECK(gate_of(keel::cpu{}, {tensor(x)}, std::nextafter(5.0f, 0.0f)).clip < 1.0f);
    auto const gate = gate_of(keel::cpu{}, {tensor(x)}, 0.5f);
    CHECK(gate.clip == 0.1f);
    CHECK(gate.pre_clip_norm == 5.0);
    CHECK(gate.post_clip_norm() == Approx(0.5));
}

TEST_CASE("anything that is not finite closes the gate and is counted") { // OLMo-core 309, Megatron-LLM 33, DeepSpeed 8035
    for (int64_t at : {0, 1, 8191, 8192, 20000}) {
        auto x = floats(data_kind::normal, 20001);
        auto const y = floats(data_kind::normal, 100);
        x[static_cast<std::size_t>(at)] = std::bit_cast<float>(0xff812345u);
        auto const before = x;
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name << " " << at);
            auto const gate = gate_of(be, {tensor(y), tensor(x), tensor(y), tensor(x)}, 1.0f);
            CHECK(gate.apply == 0);
            CHECK(gate.clip == 0.0f);
            CHECK(gate.nan == 2);
            CHECK(gate.inf == 0);
            CHECK(gate.first_non_finite == 1);
            CHECK(std::isnan(gate.pre_clip_norm));
        });
        CHECK(keel_test::equal_bits(x, before));
    }
    std::vector<keel::bf16> mixed = as_bf16(floats(data_kind::normal, 9000));
    for (std::size_t i = 0; i < 9000; i += 1000) mixed[i] = to_format<keel::bf16>(i % 2000 == 0 ? infinity : -infinity);
    auto const only_inf = gate_of(keel::cpu{}, {tensor(mixed)});
    CHECK(only_inf.inf == 9);
    CHECK(only_inf.nan == 0);
    CHECK(only_inf.pre_clip_norm == static_cast<double>(infinity));
    mixed[5] = to_format<keel::bf16>(std::numeric_limits<float>::quiet_NaN());
    CHECK(gate_of(keel::cpu{}, {tensor(mixed)}).non_finite() == 10);
}

TEST_CASE("a clip factor that no float holds closes the gate instead of clipping by 0") {
    std::vector<float> const x = {3e38f, 3e38f};
    for (float max_norm : {1e-45f, 1e-8f, 1.0f}) {
        auto const gate = gate_of(keel::cpu{}, {tensor(x)}, max_norm);
        CHECK(gate.apply == 0);
        CHECK(gate.clip == 0.0f);
        CHECK(gate.non_finite() == 0);
        CHECK(gate.pre_clip_norm == Approx(std::sqrt(2.0) * 3e38).epsilon(1e-6));
    }
    for (float max_norm : {10.0f, 1e10f}) { // 2.4e-38: normal
        auto const gate = gate_of(keel::cpu{}, {tensor(x)}, max_norm);
        CHECK(gate.apply == 1);
        CHECK(static_cast<double>(gate.clip * x[0]) == Approx(static_cast<double>(max_norm) * std::sqrt(0.5)).epsilon(1e-6));
    }
    CHECK(gate_of(keel::cpu{}, {tensor(std::vector<float>{0x1p126f})}, 1.0f).clip == 0x1p-126f); // the edge
    CHECK(gate_of(keel::cpu{}, {tensor(std::vector<float>{0x1.000002p126f})}, 1.0f).apply == 0);
}

TEST_CASE("the workspace is that of the largest tensor, wherever it stands in the list") {
    std::vector<float> const a(10, 1.0f), b(100000, 1.0f), c(50000, 1.0f);
    auto const bytes = [](std::vector<keel::gradient_tensor> const& list) {
        return keel::make_gate_workspace(keel::vec(list.data(), static_cast<int64_t>(list.size())));
    };
    CHECK(bytes({tensor(a), tensor(b), tensor(c)}) == bytes({tensor(b), tensor(a), tensor(a)}));
    CHECK(bytes({tensor(a), tensor(b), tensor(c)}) > bytes({tensor(a), tensor(a), tensor(a)}));
    CHECK(gate_of(keel::cpu{}, {tensor(a), tensor(c), tensor(b)}).pre_clip_norm == Approx(std::sqrt(150010.0)).epsilon(1e-6));
}

TEST_CASE("a peak's offset is not measured in lanes beyond the end") {
    for_each_backend([&](std::string const& name, auto const& be) {
        for (int64_t width : {1, 3, 17, 77}) {
            INFO(name << " " << width);
            guarded_matrix<float> x(2, width, 1, std::vector<float>(static_cast<std::size_t>(2 * width), -1.0f));
            keel::peak_magnitude gain;
            keel::measure_peak_magnitude(be, x.view(), &gain, 1.0f).or_throw();
            CHECK(gain.value() == 0.0f);
        }
    });
}

TEST_CASE("a model without gradients passes the gate") {
    auto const none = gate_of(keel::cpu{}, {}, 1.0f);
    CHECK(none.apply == 1);
    CHECK(none.clip == 1.0f);
    CHECK(none.pre_clip_norm == 0.0);
    CHECK(keel::step_gate{}.apply == 0);
    CHECK(keel::open_gate().apply == 1);
}

TEST_CASE("make_gate names the argument at fault and writes nothing") {
    auto const x = floats(data_kind::normal, 64);
    keel::gradient_tensor list[] = {keel::rows(x.data(), 8, 8), keel::rows(x.data(), 4, 8, 16)};
    scratch memory(keel::make_gate_workspace(keel::vec(list + 0, 2)));
    keel::step_gate gate;
    auto const s = keel::make_gate(keel::cpu{}, keel::vec(list + 0, 2), {}, &gate, memory.get());
    CHECK(s.code == keel::status_code::bad_stride);
    CHECK(s.got == 1);
    auto const one = keel::vec(list + 0, 1);
    CHECK(keel::make_gate(keel::cpu{}, one, {.max_norm = 0.0f}, &gate, memory.get()).code == keel::status_code::bad_option);
    CHECK(keel::make_gate(keel::cpu{}, one, {.max_norm = std::nanf("")}, &gate, memory.get()).code == keel::status_code::bad_option);
    CHECK(keel::make_gate(keel::cpu{}, one, {}, nullptr, memory.get()).code == keel::status_code::bad_pointer);
    CHECK(keel::make_gate(keel::cpu{}, one, {}, &gate, {}).code == keel::status_code::small_workspace);
    CHECK(same(gate, keel::step_gate{}));
    // A transposed vector and a matrix of one row are dense.
    list[0] = keel::view<float const, 2>{x.data(), {1, 64}, {999, 1}};
    list[1] = keel::view<float const, 2>{x.data(), {64, 1}, {1, 7}};
    CHECK(keel::make_gate(keel::cpu{}, keel::vec(list + 0, 2), {}, &gate, memory.get()).ok());
}
