// All 2^32 floats to every format, under every rounding and overflow policy that takes no random bits, by the packs of the
// architecture that this program is compiled for (or, with KEEL_SWEEP_SCALAR, by float alone). sweep.py builds one a level.
//
//     floats [--edges] [--threads N]
//
// Codes change at words that changes.hpp states in integers; the table in double of format/oracle.hpp must agree on both sides of each.
// Every word between two changes then goes through keel, all policies at once, and must give the one code of its run.
// --edges takes only the ends of long runs: for an emulator, which would need days.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <keel/backend/cpu/pack.hpp>

#include "changes.hpp"

namespace {

using namespace keel;
using namespace keel_test;

#if defined(KEEL_SWEEP_SCALAR)
using lanes = float;
constexpr char const* lanes_name = "float";
#else
using lanes = pack<native_arch>;
constexpr char const* lanes_name = native_arch::name();
#endif
constexpr uint32_t width = static_cast<uint32_t>(lane_traits<lanes>::width);

/// Nine policies, and the short cut for values that stay in the range.
constexpr std::size_t policies = 9, short_cut = 9, columns = 10;
using codes = std::array<uint32_t, columns>;
template <class P> constexpr std::size_t place_of = 3 * static_cast<std::size_t>(P::on_overflow) + static_cast<std::size_t>(P::round);
int name_of(std::size_t place) { return place == short_cut ? -2 : static_cast<int>(place / 3 * 10 + place % 3); } // as policy::id
template <class T> constexpr bool has_short_cut = format_traits<T>::bias != 127;

template <class U> KEEL_FN U lane_numbers() {
    if constexpr (std::is_same_v<U, uint32_t>) return 0u;
    else return iota<U>();
}
template <class U> KEEL_FN uint32_t largest(U const& u) {
    if constexpr (std::is_same_v<U, uint32_t>) return u;
    else return max_word(u);
}

/// What tells codes from the wanted ones among floats first ... first + n - 1, a word a policy: 0 where all are equal, and the difference
/// itself where n = 1. Lanes past the end take the last float again.
template <class T, bool ShortCut> KEEL_FLATTEN __attribute__((noinline)) codes differences(uint32_t first, uint32_t n, codes const& wanted) {
    using U = bits_of<lanes>;
    U target[columns], found[columns];
    for (std::size_t k = 0; k < columns; ++k) target[k] = U(wanted[k]), found[k] = U(0u);
    for (uint32_t at = 0; at < n; at += width) {
        lanes const x = as_float(umin(lane_numbers<U>() + U(at), U(n - 1)) + U(first));
        for_each_policy<T>([&]<class P>(P) {
            constexpr std::size_t k = place_of<P>;
            found[k] = found[k] | (encode_words<T, P::on_overflow, P::round>(x) ^ target[k]);
        });
        if constexpr (ShortCut) found[short_cut] = found[short_cut] | (encode_bounded_words<T>(x) ^ target[short_cut]);
    }
    codes out;
    for (std::size_t k = 0; k < columns; ++k) out[k] = largest(found[k]);
    return out;
}

/// One run of floats that all have the wanted codes: if not, the first that has not is counted.
template <class T, bool ShortCut> void check_run(uint32_t first, uint32_t n, codes const& wanted, mismatches& bad) {
    codes constexpr equal{};
    if (differences<T, ShortCut>(first, n, wanted) == equal) return;
    while (n > 1) {
        uint32_t const half = n / 2;
        bool const in_first_half = differences<T, ShortCut>(first, half, wanted) != equal;
        first += in_first_half ? 0 : half;
        n = in_first_half ? half : n - half;
    }
    codes const d = differences<T, ShortCut>(first, 1, wanted);
    for (std::size_t k = 0; k < columns; ++k)
        bad.check(static_cast<double>(float_of(first)), wanted[k] ^ d[k], wanted[k], name_of(k));
}

/// The changes of one sign, a list a policy.
using change_lists = std::array<std::vector<change>, policies>;
template <class T> change_lists all_changes(bool negative) {
    change_lists lists;
    for_each_policy<T>([&]<class P>(P) { lists[place_of<P>] = changes(word_layout_of<T>, P::on_overflow, P::round, negative); });
    return lists;
}

constexpr uint32_t edge = 64; ///< how much of both ends of a run is its edge

/// Magnitudes begin ... end - 1 of one sign.
template <class T> void sweep_part(change_lists const& lists, uint32_t sign, uint32_t begin, uint32_t end, bool edges, mismatches& bad) {
    std::array<std::size_t, policies> at;
    for (std::size_t k = 0; k < policies; ++k) {
        auto const after = std::upper_bound(lists[k].begin(), lists[k].end(), begin,
                                            [](uint32_t word, change const& c) { return word < c.word; });
        at[k] = static_cast<std::size_t>(after - lists[k].begin()) - 1;
    }
    auto const next_change = [&](std::size_t k) { return at[k] + 1 < lists[k].size() ? lists[k][at[k] + 1].word : end; };
    for (uint32_t word = begin; word < end;) {
        uint32_t stop = end;
        codes wanted{};
        for (std::size_t k = 0; k < policies; ++k) {
            wanted[k] = lists[k][at[k]].code;
            stop = std::min(stop, next_change(k));
        }
        auto const run = [&]<bool ShortCut>(uint32_t from, uint32_t to) { check_run<T, ShortCut>(sign | from, to - from, wanted, bad); };
        auto const check = [&]<bool ShortCut>() {
            if (edges && stop - word > 2 * edge) {
                run.template operator()<ShortCut>(word, word + edge);
                run.template operator()<ShortCut>(stop - edge, stop);
            } else {
                run.template operator()<ShortCut>(word, stop);
            }
        };
        uint32_t const max_word_in_range = word_of_code(word_layout_of<T>, word_layout_of<T>.max_code);
        if (has_short_cut<T> && word <= max_word_in_range) {
            stop = std::min(stop, max_word_in_range + 1);
            wanted[short_cut] = wanted[place_of<policy<overflow::saturate, rounding::nearest_even>>];
            check.template operator()<has_short_cut<T>>();
        } else {
            check.template operator()<false>();
        }
        word = stop;
        for (std::size_t k = 0; k < policies; ++k) at[k] += next_change(k) == word && word < end;
    }
}

/// Both oracles: on both sides of each change the definition in double must give the codes that the integers say.
template <class T> void check_changes(change_lists const& lists, bool negative, mismatches& bad) {
    auto const table = [] {
        if constexpr (std::is_same_v<T, e8m0>) return 0;
        else return oracle(layout_of<T>);
    }();
    for_each_policy<T>([&]<class P>(P p) {
        auto const code_in_double = [&](uint32_t word) {
            double const x = static_cast<double>(float_of(word | (negative ? sign_bit : 0u)));
            if constexpr (std::is_same_v<T, e8m0>) return scale_code(x, P::on_overflow, P::round);
            else return table.encode(x, P::on_overflow, P::round);
        };
        auto const& list = lists[place_of<P>];
        for (std::size_t i = 0; i < list.size(); ++i) {
            uint32_t const last = (i + 1 < list.size() ? list[i + 1].word : sign_bit) - 1;
            for (uint32_t const word : {list[i].word, last})
                bad.check(static_cast<double>(float_of(word)), list[i].code, code_in_double(word), p.id);
        }
    });
}

/// A change stated one word too late must be found, whatever the policy: a sweep that sees no fault proves nothing.
template <class T> bool sees_faults(change_lists const& lists) {
    for (std::size_t k = 0; k < policies; ++k) {
        change_lists wrong = lists;
        change& moved = wrong[k][wrong[k].size() / 2];
        mismatches bad;
        moved.word += 1;
        sweep_part<T>(wrong, 0, moved.word - 1000, moved.word + 1000, false, bad);
        if (bad.count == 0 || word_of(static_cast<float>(bad.input)) != moved.word - 1 || bad.got != moved.code) return false;
    }
    return true;
}

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

template <class T> bool sweep(bool edges, unsigned threads) {
    auto const began = std::chrono::steady_clock::now();
    double const processor_before = processor_seconds();
    std::array<change_lists, 2> const lists{all_changes<T>(false), all_changes<T>(true)};
    mismatches oracles;
    for (bool const negative : {false, true}) check_changes<T>(lists[negative], negative, oracles);

    constexpr uint32_t parts_a_sign = 128, part_size = sign_bit / parts_a_sign;
    std::atomic<uint32_t> next{0};
    std::vector<mismatches> bad(threads);
    std::vector<std::thread> workers;
    for (mismatches& own : bad)
        workers.emplace_back([&] {
            mismatches some; // on this thread's stack: counters side by side would share a cache line
            for (uint32_t part = next++; part < 2 * parts_a_sign; part = next++) {
                uint32_t const sign = part / parts_a_sign, begin = part % parts_a_sign * part_size;
                sweep_part<T>(lists[sign], sign << 31, begin, begin + part_size, edges, some);
            }
            own = some;
        });
    for (std::thread& worker : workers) worker.join();

    bool const sighted = sees_faults<T>(lists[0]);
    bool good = sighted && oracles.count == 0;
    for (mismatches const& m : bad) good = good && m.count == 0;
    double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::printf("%-5s by %s: %s, %.1f s, %.1f s of processors\n", word_layout_of<T>.name, lanes_name, good ? "all well" : "FAILED", seconds,
                processor_seconds() - processor_before);
    auto const tell = [](char const* what, mismatches const& m) {
        if (m.count != 0)
            std::printf("    %s: %lld runs, first at %a: got %x, wanted %x (policy %d)\n", what, static_cast<long long>(m.count), m.input,
                        m.got, m.wanted, m.policy);
    };
    tell("the oracles disagree", oracles);
    for (mismatches const& m : bad) tell("keel differs", m);
    if (!sighted) std::printf("    the sweep does not see a change that is one word off\n");
    std::fflush(stdout);
    return good;
}

} // namespace

int main(int argc, char* argv[]) {
    bool edges = false;
    unsigned threads = std::max(1u, std::thread::hardware_concurrency());
    for (int i = 1; i < argc; ++i) {
        std::string_view const argument = argv[i];
        if (argument == "--edges") edges = true;
        else if (argument == "--threads" && i + 1 < argc) threads = std::max(1u, static_cast<unsigned>(std::stoul(argv[++i])));
        else return std::fprintf(stderr, "floats [--edges] [--threads N]\n"), 2;
    }
    bool good = sweep<bf16>(edges, threads);
    good = sweep<f16>(edges, threads) && good;
    good = sweep<e4m3>(edges, threads) && good;
    good = sweep<e5m2>(edges, threads) && good;
    good = sweep<e8m0>(edges, threads) && good;
    return good ? 0 : 1;
}
