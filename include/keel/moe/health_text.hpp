// The balance line as text, in memory of its own, for whatever a log is written with.
//
//     std::puts(keel::balance_text(line).c_str());
//
//     demand 3.20x (min 0.12, entropy 0.931) | served 1.25x (min 0.20, entropy 0.990) | dropped 21.4% | dead 2 | bias spread 0.0310,
//     60 of 64 moved, 3.1% turned round | routed 22.0% of the output (norm 25.3%), 89.8% of the parameters       (one line)
#pragma once

#include <keel/moe/health.hpp>

namespace keel::inline KEEL_ABI {

/// What is not known is left out; an alarm stands at the end. Numbers are rounded to the digits shown, halves up.
class balance_text {
  public:
    KEEL_HOST explicit balance_text(balance_line const& line) {
        load("demand ", line.demand_max, line.demand_min, line.demand_entropy);
        load(" | served ", line.served_max, line.served_min, line.served_entropy);
        words(" | dropped "), percent(line.dropped);
        words(" | dead "), whole(line.dead);
        words(" | bias spread "), decimal(static_cast<double>(line.bias_spread), 4);
        if (line.bias_frozen) words(", frozen");
        else words(", "), whole(line.bias_moved), words(" of "), whole(line.experts), words(" moved");
        if (!line.bias_frozen && line.sign_flips >= 0.0) words(", "), percent(line.sign_flips), words(" turned round");
        layer_shares const& s = line.shares;
        if (known(s.output) || known(s.norm)) words(" | routed");
        if (known(s.output)) words(" "), percent(s.output), words(" of the output");
        if (known(s.norm)) words(" (norm "), percent(s.norm), words(")");
        if (known(s.parameters)) words(known(s.output) || known(s.norm) ? ", " : " | routed "), percent(s.parameters), words(" of the parameters");
        if (line.bias_nan > 0) words(" | ALARM: NaN in the bias");
        if (line.concealed()) words(" | ALARM: capacity hides an imbalance, and the bias is still");
    }

    /// Ends in 0; no line break.
    KEEL_HOST char const* c_str() const { return text_; }

  private:
    KEEL_HOST static bool known(double x) { return x == x; }
    KEEL_HOST void letter(char c) {
        if (length_ + 1 < size) text_[length_++] = c;
    }
    KEEL_HOST void words(char const* text) {
        for (; *text != '\0'; ++text) letter(*text);
    }
    KEEL_HOST void whole(int64_t n) { // not negative
        char digits[20];
        int count = 0;
        do digits[count++] = static_cast<char>('0' + n % 10);
        while ((n /= 10) != 0);
        while (count > 0) letter(digits[--count]);
    }
    KEEL_HOST void decimal(double x, int digits) {
        if (x != x) return words("nan");
        if (x < 0.0) letter('-'), x = -x;
        if (x >= 1e14) return words("over 1e14");
        int64_t unit = 1;
        for (int i = 0; i < digits; ++i) unit *= 10;
        auto const scaled = static_cast<int64_t>(__builtin_fma(x, static_cast<double>(unit), 0.5));
        whole(scaled / unit);
        letter('.');
        for (int64_t place = unit / 10; place > 0; place /= 10) letter(static_cast<char>('0' + scaled / place % 10));
    }
    KEEL_HOST void percent(double share) { decimal(100.0 * share, 1), letter('%'); }
    KEEL_HOST void load(char const* name, double top, double low, double entropy) {
        words(name), decimal(top, 2), words("x (min "), decimal(low, 2), words(", entropy "), decimal(entropy, 3), letter(')');
    }

    static constexpr int size = 512; ///< the longest line has under 400
    char text_[size] = {};
    int length_ = 0;
};

} // namespace keel::inline KEEL_ABI
