// Parsing, help and settings from one table of options.
#include "run/options.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "common/error.h"
#include "data/text.h"

namespace {

std::string value_text(const Option& option) {
    switch (option.kind) {
        case Option::Int: return std::to_string(*static_cast<const int*>(option.value));
        case Option::Float:
            return format("%g", static_cast<double>(*static_cast<const float*>(option.value)));
        case Option::Flag: return *static_cast<const bool*>(option.value) ? "on" : "off";
        default: return *static_cast<const std::string*>(option.value);
    }
}

Option* find_option(std::vector<Option>& table, const std::string& name) {
    for (Option& option : table)
        if (name == option.name || (*option.letter && name == option.letter))
            return &option;
    return nullptr;
}

// A range has one or more pieces with " or " between them. A piece is a number or "low..high", of
// which either end may be left out.
bool in_range(double value, const std::string& range) {
    for (const std::string& piece : split(range, " or ")) {
        const size_t dots = piece.find("..");
        const std::string low = piece.substr(0, dots);
        const std::string high = dots == std::string::npos ? low : piece.substr(dots + 2);
        if ((low.empty() || value >= std::stod(low)) && (high.empty() || value <= std::stod(high)))
            return true;
    }
    return false;
}

void set_value(Option& option, const std::string& text) {
    const auto check = [&](bool good, const std::string& why) {
        if (!good)
            throw UsageError(
                format("%s: \"%s\" %s", title(option).c_str(), text.c_str(), why.c_str()));
    };
    const std::string range = option.range;
    const auto number = [&](bool integer) {
        char* end = nullptr;
        errno = 0;
        const double value = std::strtod(text.c_str(), &end);
        const bool became_zero = value == 0 ? errno == ERANGE : static_cast<float>(value) == 0;
        const bool all =
            !text.empty() && end == text.c_str() + text.size() && !std::isspace(text[0] & 0xFF);
        const bool digits = text.find_first_not_of("-0123456789") == std::string::npos;
        check(all && (!integer || digits),
              integer ? "is not an integer" : "is not a finite number");
        check(std::isfinite(static_cast<float>(value)), "is not a finite number");
        check(in_range(value, range) && (!integer || std::fabs(value) <= INT_MAX),
              "is out of range " + range);
        check(!became_zero, "is too small: a float would make 0 of it");
        return value;
    };
    switch (option.kind) {
        case Option::Int: *static_cast<int*>(option.value) = static_cast<int>(number(true)); break;
        case Option::Float:
            number(false);
            *static_cast<float*>(option.value) = std::strtof(text.c_str(), nullptr);
            break;
        case Option::Choice: {
            const std::vector<std::string> choices = split(range, "|");
            check(std::find(choices.begin(), choices.end(), text) != choices.end(),
                  "is not one of " + range);
            *static_cast<std::string*>(option.value) = text;
            break;
        }
        case Option::Path:
            check(!text.empty(), "is no path");
            *static_cast<std::string*>(option.value) = text;
            break;
        case Option::String: *static_cast<std::string*>(option.value) = text; break;
        case Option::Flag:
            check(text == "0" || text == "1", "is not 0 or 1");
            *static_cast<bool*>(option.value) = text == "1";
            break;
    }
    option.given = option.kind != Option::Flag || text == "1";
}

}  // namespace

std::string title(const Option& option) {
    return *option.letter ? format("%s (%s)", option.name, option.letter) : option.name;
}

Parsed parse_options(int argc, const char* const* argv, std::vector<Option>& table) {
    const std::vector<std::string> args(argv + 1, argv + argc);
    const auto is_flag_value = [&](size_t i) {
        return i < args.size() && (args[i] == "0" || args[i] == "1");
    };
    std::vector<const Option*> given;
    for (size_t i = 0; i < args.size(); i++) {
        if (args[i] == "--help" || (args[i] == "-h" && !is_flag_value(i + 1)))
            return Parsed::help;
        const size_t equals = args[i][0] == '-' ? args[i].find('=') : std::string::npos;
        const bool attached = equals != std::string::npos;
        const std::string name = args[i].substr(0, equals);
        std::string value = attached ? args[i].substr(equals + 1) : "1";
        Option* option = find_option(table, name);
        if (!option)
            throw UsageError(format(
                "unknown option %s; see --help, for llm.c's FROM_LLMC.md, and quote patterns",
                name.c_str()));
        if (std::find(given.begin(), given.end(), option) != given.end())
            throw UsageError(format("%s is given twice: leave out one", title(*option).c_str()));
        given.push_back(option);
        if (!attached && option->kind != Option::Flag) {
            // "-1" is a value, but the name of another option means that this one's value was
            // forgotten.
            i++;
            if (i == args.size() || find_option(table, args[i].substr(0, args[i].find('='))))
                throw UsageError(format("%s needs a value", title(*option).c_str()));
            value = args[i];
        } else if (!attached && is_flag_value(i + 1)) {
            value = args[++i];
        }
        set_value(*option, value);
    }
    return Parsed::options;
}

std::string options_help(const std::string& program, const std::string& about,
                         const std::vector<Option>& table) {
    constexpr size_t kHelpWidth = 110;  // columns
    // The first column is "  -b,  --batch N". Options without a letter are indented to line up.
    // What follows the name, by Option::Kind.
    const char* const arguments[] = {" N", " X", " TEXT", " PATH", " NAME", ""};
    const auto left = [&](const Option& option) {
        const std::string letter = *option.letter ? std::string(option.letter) + "," : "";
        return format("  %-4s %s%s", letter.c_str(), option.name, arguments[option.kind]);
    };
    size_t width = 0;
    for (const Option& option : table)
        width = std::max(width, left(option).size() + 2);

    std::string text = "usage: " + program + " [options]\n\n" + about + "\n";
    for (const Option& option : table) {
        if (*option.group)
            text += format("\n%s\n", option.group);
        // A default in the help's own words says more than its number, and a range without an end
        // says little.
        const std::string range = option.range;
        const bool in_words = std::strstr(option.help, "default: ");
        const bool endless = !range.empty() && range.back() == '.';
        std::string notes = endless || (in_words && option.kind != Option::Choice) ? "" : range;
        std::string value = in_words ? "" : value_text(option);
        if (option.kind == Option::Flag && value == "off")
            value = "";
        if (!value.empty())
            notes += (notes.empty() ? "default " : "; default ") + value;
        const std::string help =
            notes.empty() ? option.help : format("%s (%s)", option.help, notes.c_str());

        // Help in the second column, wrapped at words.
        std::string line = left(option);
        line.resize(width - 1, ' ');
        for (const std::string& word : split(help, " ")) {
            if (line.size() + 1 + word.size() > kHelpWidth) {
                text += line + "\n";
                line.assign(width - 1, ' ');
            }
            line += " " + word;
        }
        text += line + "\n";
    }
    return text;
}

Fields options_settings(const std::vector<Option>& table) {
    Fields settings;
    for (const Option& option : table)
        if (const std::string value = value_text(option); !value.empty())
            settings.push_back({option.name, value});
    return settings;
}

std::string options_changed(const std::vector<Option>& table, const std::vector<Option>& defaults) {
    std::string text;
    std::string group;
    for (size_t i = 0; i < table.size(); i++) {
        if (*table[i].group)
            group = table[i].group;
        const std::string value = value_text(table[i]);
        if (value == value_text(defaults[i]))
            continue;
        if (!group.empty())
            text += format("%s%-17s", text.empty() ? "" : "\n", group.c_str());
        group.clear();
        text += format("  %s", table[i].name) +
                (table[i].kind == Option::Flag ? "" : " " + shell_quoted(value));
    }
    return text + "\n";
}
