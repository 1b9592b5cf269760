# Builds ggml-hina into a llama.cpp or ggml checkout, without changing a line of it:
#
#   cmake -B build -DCMAKE_PROJECT_ggml_INCLUDE=/path/to/ggml-hina/ggml-backend/ggml-hina.cmake
#
# CMake includes this file right after ggml's own project() call. The target `ggml` does not exist yet there, so the work is
# put off to the end of ggml's folder.

if (NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    message(STATUS "ggml-hina: only for x86-64 Linux, left out")
    return()
endif()

get_filename_component(GGML_HINA_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(GGML_HINA_GGML_ROOT "${CMAKE_CURRENT_SOURCE_DIR}")
set(GGML_HINA_TARGET_DIR "${CMAKE_BINARY_DIR}/ggml-hina" CACHE PATH "where cargo builds ggml-hina")

function(ggml_hina_attach)
    find_program(GGML_HINA_CARGO cargo HINTS "$ENV{HOME}/.cargo/bin" REQUIRED)
    set(lib "${GGML_HINA_TARGET_DIR}/release/libggml_hina.a")
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${GGML_HINA_ROOT}/src/*.rs" "${GGML_HINA_ROOT}/ggml-backend/*.c")

    add_custom_command(
        OUTPUT  "${lib}"
        COMMAND ${CMAKE_COMMAND} -E env --unset=GGML_HINA_GGML_LIB "GGML_HINA_GGML_DIR=${GGML_HINA_GGML_ROOT}"
                "CARGO_TARGET_DIR=${GGML_HINA_TARGET_DIR}"
                "${GGML_HINA_CARGO}" rustc --quiet --release --lib --crate-type staticlib --package ggml-hina
        WORKING_DIRECTORY "${GGML_HINA_ROOT}"
        DEPENDS ${sources} "${GGML_HINA_ROOT}/Cargo.toml" "${GGML_HINA_ROOT}/build.rs"
        COMMENT "Building ggml-hina with cargo"
        VERBATIM)
    add_custom_target(ggml_hina_cargo DEPENDS "${lib}")

    target_sources(ggml PRIVATE "${GGML_HINA_ROOT}/ggml-backend/register.c")
    target_include_directories(ggml PRIVATE src)
    add_dependencies(ggml ggml_hina_cargo)

    get_target_property(type ggml TYPE)
    add_library(ggml_hina STATIC IMPORTED GLOBAL)
    set_target_properties(ggml_hina PROPERTIES
        IMPORTED_LOCATION "${lib}"
        INTERFACE_LINK_LIBRARIES "$<$<STREQUAL:${type},STATIC_LIBRARY>:ggml>;ggml-base;${CMAKE_DL_LIBS};m;pthread")
    add_dependencies(ggml_hina ggml_hina_cargo)
    target_link_libraries(ggml PRIVATE ggml_hina)

    if (type STREQUAL "STATIC_LIBRARY")
        target_link_options(ggml INTERFACE "-Wl,--undefined=ggml_hina_linked")
    endif()
    message(STATUS "ggml-hina: added to ggml (${type})")
endfunction()

cmake_language(DEFER CALL ggml_hina_attach)
