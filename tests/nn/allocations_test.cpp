// No call of quantise, norm or the layers allocates: operator new is counted in this program. Not under a sanitizer, whose own
// operator new it would be.
#if defined(__has_feature)
#define KEEL_TEST_HAS(feature) __has_feature(feature)
#else
#define KEEL_TEST_HAS(feature) 0
#endif
#if !KEEL_TEST_HAS(address_sanitizer) && !KEEL_TEST_HAS(thread_sanitizer) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#include <cstdlib>
#include <new>

#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/nn/cross_entropy.hpp>
#include <keel/nn/embedding.hpp>
#include <keel/nn/fp8_linear.hpp>
#include <keel/nn/sum.hpp>
#include <keel/nn/swiglu.hpp>
#include <keel/nn/swiglu_quantize.hpp>
#include <keel/norm/rms_norm.hpp>
#include <keel/norm/rms_norm_quantize.hpp>
#include <keel/quantize/quantize_stochastic.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

#include <atomic>

namespace {
std::atomic<long> allocations{0};
} // namespace

[[gnu::noinline]] void* operator new(std::size_t n) {
    ++allocations;
    if (void* const p = std::malloc(n == 0 ? 1 : n)) return p;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

TEST_CASE("quantise, norm and layers allocate nothing") {
    using namespace keel;
    int64_t const m = 140, n = 132;
    thread_pool const pool(2);
    cpu const be(pool);
    auto const floats = [](int64_t count, float v) { return std::vector<float>(static_cast<std::size_t>(count), v); };
    auto x = floats(m * n, 1), y = floats(m * n, 0), dx = floats(m * n, 0), d = floats(n, 0), dd = floats(n, 0), r = floats(m, 0), loss = floats(m, 0),
         lse = floats(m, 0), rest = floats(m, 0), w = floats(n * n, 0.5f), dw = floats(n * n, 0), s1 = floats(m * 2, 0), s2 = floats(2 * n, 0);
    std::vector<e4m3> q(static_cast<std::size_t>(m * n)), q2(q), wc(static_cast<std::size_t>(n * n)), sc(q);
    std::vector<int32_t> id(static_cast<std::size_t>(m), 3);
    fp8_linear_plan<> const plan{m, n, n};
    auto wsc = floats(plan.weight_scales(), 0), ssc = floats(plan.saved_scales(), 0);
    keel_test::scratch memory(1 << 23);
    workspace const ws = memory.get();
    auto const X = rows(x.data(), m, n), Y = rows(y.data(), m, n), DX = rows(dx.data(), m, n), W = rows(w.data(), n, n);
    auto const ids = vec(id.data(), m);
    auto const delta = vec(d.data(), n);
    row_blocks<> const along_rows{rows(q.data(), m, n), rows(s1.data(), m, 2)};
    column_blocks<> const along_columns{rows(q2.data(), m, n), rows(s2.data(), 2, n)};
    auto const wq = plan.weight(wc.data(), wsc.data());
    auto const saved = plan.saved(sc.data(), ssc.data());
    rms_norm_saved const rms{vec(r.data(), m)};
    cross_entropy_saved const ce{vec(lse.data(), m), vec(rest.data(), m)};
    report seen;
    long const before = allocations;
    bool ok = true;
    auto const ran = [&](status const& s) { ok = ok && s.ok(); };
    ran(rms_norm(be, X, delta, Y, rms));
    ran(rms_norm_backward(be, Y, X, delta, rms, {DX, vec(dd.data(), n)}, {}, ws));
    ran(add_rms_norm(be, X, X, delta, DX, Y, rms));
    ran(add_rms_norm_backward(be, Y, Y, X, delta, rms, {DX, vec(dd.data(), n)}, {}, ws));
    ran(quantize<overflow::saturate>(be, W, wq, {}, &seen));
    ran(quantize_pair<overflow::saturate>(be, X, along_rows, along_columns));
    ran(quantize_stochastic<overflow::saturate>(be, X, along_rows, {}));
    ran(rms_norm_quantize<bf16, overflow::saturate>(be, X, delta, along_rows, rms));
    ran(add_rms_norm_quantize<float, overflow::saturate>(be, X, X, delta, DX, along_rows));
    ran(swiglu_quantize<float, overflow::saturate>(be, X, X, along_rows));
    ran(dequantize(be, along_columns, Y));
    ran(scaled_matmul(be, along_rows, transposed(wq), Y, {}, ws));
    ran(fp8_linear(be, plan, X, wq, Y, saved, nullptr, ws));
    ran(fp8_linear_backward(be, plan, X, wq, saved, {DX, rows(dw.data(), n, n)}, {}, nullptr, ws));
    ran(linear(be, X, W, Y, ws));
    ran(linear_backward(be, Y, X, W, {DX, rows(dw.data(), n, n)}, {}, ws));
    ran(swiglu(be, X, X, Y));
    ran(swiglu_backward(be, X, X, X, {DX, Y}));
    ran(cross_entropy(be, X, ids, vec(loss.data(), m), ce));
    ran(cross_entropy_backward(be, X, ids, ce, DX));
    ran(embedding(be, X, ids, Y));
    ran(embedding_backward(be, Y, ids, DX, {}, ws));
    ran(sum(be, X, X, X, Y));
    ran(rms_norm(be, X, delta, rows(y.data(), m, n - 1)).ok() ? status{status_code::bad_shape} : status{}); // refusals too
    CHECK(allocations == before);
    CHECK(ok);
    ::operator delete(::operator new(3)); // the counter counts; a new-expression clang would leave out
    CHECK(allocations == before + 1);
}

#endif
