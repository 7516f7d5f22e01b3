// Everything for the CPU. The CUDA backend is added by keel/cuda.hpp.
#pragma once

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/backend/reference.hpp>
#include <keel/backend/simt.hpp>
#include <keel/core/report.hpp>
#include <keel/core/status.hpp>
#include <keel/core/view.hpp>
#include <keel/core/workspace.hpp>
#include <keel/guard/step_gate.hpp>
#include <keel/norm/rms_norm.hpp>
#include <keel/optim/adamw.hpp>
