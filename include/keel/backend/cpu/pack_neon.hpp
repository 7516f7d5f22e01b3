// machine<Arch> on AArch64 Advanced SIMD.
#pragma once

#include <arm_neon.h>

#include <keel/backend/cpu/pack_scalar.hpp>

namespace keel::inline KEEL_ABI::detail {

template <> struct machine<arch::neon> : xsimd_machine<xsimd::neon64>, buffered_partials<machine<arch::neon>, 4> {
    KEEL_FN static m set_mask(bool x) { return m(vdupq_n_u32(x ? 0xffffffffu : 0u)); }
    KEEL_FN static f div(f const& a, f const& b) { return f(vdivq_f32(a, b)); }
    KEEL_FN static f sqrt(f const& a) { return f(vsqrtq_f32(a)); }
    KEEL_FN static f fma(f const& a, f const& b, f const& c) { return f(vfmaq_f32(c, a, b)); }
    KEEL_FN static u bits(f const& a) { return u(vreinterpretq_u32_f32(a)); }
    KEEL_FN static f as_float(u const& a) { return f(vreinterpretq_f32_u32(a)); }
    template <int K> KEEL_FN static u shl(u const& a) { return u(vshlq_n_u32(a, K)); }
    template <int K> KEEL_FN static u shr(u const& a) {
        if constexpr (K == 0)
            return a; // the instruction takes 1 .. 32
        else
            return u(vshrq_n_u32(a, K));
    }
    KEEL_FN static u shr_by(u const& a, u const& k) {
        // A left shift by a negative count, of which the instruction reads the low byte only.
        uint32x4_t const count = vminq_u32(k, vdupq_n_u32(32));
        return u(vshlq_u32(a, vnegq_s32(vreinterpretq_s32_u32(count))));
    }
    KEEL_FN static u umin(u const& a, u const& b) { return u(vminq_u32(a, b)); }
    KEEL_FN static u umax(u const& a, u const& b) { return u(vmaxq_u32(a, b)); }
    KEEL_FN static u smax(u const& a, u const& b) {
        return u(vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b))));
    }
    KEEL_FN static m gt(u const& a, u const& b) { return m(vcgtq_u32(a, b)); }
    KEEL_FN static m eq(u const& a, u const& b) { return m(vceqq_u32(a, b)); }
    KEEL_FN static bool any(m const& a) { return vmaxvq_u32(a) != 0; }
    KEEL_FN static u select(m const& c, u const& a, u const& b) { return u(vbslq_u32(c, a, b)); }
    KEEL_FN static f select(m const& c, f const& a, f const& b) { return f(vbslq_f32(c, a, b)); }

    KEEL_FN static u load_bytes(void const* p) {
        return u(vreinterpretq_u32_u8(vld1q_u8(static_cast<uint8_t const*>(p))));
    }
    KEEL_FN static u load_words(uint32_t const* p) { return u(vld1q_u32(p)); }
    KEEL_FN static u load_words(uint16_t const* p) { return u(vmovl_u16(vld1_u16(p))); }
    KEEL_FN static u load_words(uint8_t const* p) {
        uint32_t four;
        __builtin_memcpy(&four, p, sizeof four);
        return u(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
    }
    KEEL_FN static void store_words(uint32_t* p, u const& x) { vst1q_u32(p, x); }
    KEEL_FN static void store_words(uint16_t* p, u const& x) { vst1_u16(p, vmovn_u32(x)); }
    KEEL_FN static void store_words(uint8_t* p, u const& x) {
        uint16x4_t const half = vmovn_u32(x);
        uint32_t const four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(half, half))), 0);
        __builtin_memcpy(p, &four, sizeof four);
    }

    KEEL_FN static float tree_sum(f const& a) {
        float32x2_t const b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
        return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
    }
    KEEL_FN static uint32_t max_word(u const& a) { return vmaxvq_u32(a); }
    KEEL_FN static uint32_t sum_words(u const& a) { return vaddvq_u32(a); }
    template <class U> KEEL_FN static void transpose(U (&r)[4]) {
        uint32x4x2_t const t01 = vtrnq_u32(r[0].v, r[1].v);
        uint32x4x2_t const t23 = vtrnq_u32(r[2].v, r[3].v);
        r[0].v = u(vcombine_u32(vget_low_u32(t01.val[0]), vget_low_u32(t23.val[0])));
        r[1].v = u(vcombine_u32(vget_low_u32(t01.val[1]), vget_low_u32(t23.val[1])));
        r[2].v = u(vcombine_u32(vget_high_u32(t01.val[0]), vget_high_u32(t23.val[0])));
        r[3].v = u(vcombine_u32(vget_high_u32(t01.val[1]), vget_high_u32(t23.val[1])));
    }
};

} // namespace keel::inline KEEL_ABI::detail
