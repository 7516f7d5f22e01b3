// A CPU group's stores past the caches: the bytes of its other stores, wherever a row begins, and none beside them.
#include <cstring>
#include <limits>
#include <vector>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/float32.hpp>
#include <keel/format/fp8.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

template <class Arch, class T, auto... Policy> void check_stores() {
    constexpr int64_t room = 160;
    auto values = floats(data_kind::normal, room, 3);
    values[5] = std::numeric_limits<float>::quiet_NaN(), values[40] = -std::numeric_limits<float>::infinity(), values[41] = 1e-39f;
    for (int64_t start : {0, 1, 3, 4, 8, 16, 17, 32})
        for (int64_t n : {1, 15, 64, 101}) {
            auto const stored = [&](bool streams) {
                alignas(64) unsigned char memory[static_cast<std::size_t>(room) * sizeof(T)];
                std::memset(&memory[0], 0xa5, sizeof memory);
                keel::cpu_row_group<Arch> g{};
                g.streams = streams;
                T* const to = reinterpret_cast<T*>(&memory[0]) + start;
                g.each(n, [&](auto at) { g.template store<Policy...>(to, at, g.load(static_cast<float const*>(values.data()), at)); });
                keel::store_fence();
                return std::vector<unsigned char>(&memory[0], &memory[0] + sizeof memory);
            };
            CHECK(stored(true) == stored(false));
        }
}

} // namespace

TEST_CASE("stores past the caches write the bytes of any others") {
    for_each_cpu([&]<class Arch, class Threads>(std::string const& name, keel::cpu<Arch, Threads> const&) {
        INFO(name);
        check_stores<Arch, float>();
        check_stores<Arch, keel::bf16>();
        check_stores<Arch, keel::f16>();
        check_stores<Arch, keel::e4m3, keel::overflow::saturate>();
    });
}
