// What every consumer project builds, together with second.cpp: a program of two translation units that both include keel.
#include <cstdio>

#include <keel/keel.hpp>

float second_translation_unit(float x);

int main() {
    float x[4] = {3, 4, 0, 0}, y[4] = {};
    keel::status const s = keel::rms_norm(keel::cpu{}, keel::rows(x, 1, 4), keel::view<float, 1>{}, keel::rows(y, 1, 4));
    if (!s.ok()) {
        std::puts(s.message().c_str());
        return 1;
    }
    std::printf("keel %d.%d.%d: %g\n", KEEL_VERSION_MAJOR, KEEL_VERSION_MINOR, KEEL_VERSION_PATCH, static_cast<double>(y[1]));
    return y[1] == second_translation_unit(4) ? 0 : 1;
}
